"""Parts of learners that look at a task before they start on it: ARML and HSML are made of them.

A part is a frozen description with `init` (draw its tensors) and a call on them; a learner keeps the
tensors among its meta-parameters, behind the part's name and a slash.
"""

from torchemo.learners.gradient.parts.autoencoder import MeanAutoencoder as MeanAutoencoder
from torchemo.learners.gradient.parts.autoencoder import SequenceAutoencoder as SequenceAutoencoder
from torchemo.learners.gradient.parts.autoencoder import SetAutoencoder as SetAutoencoder
from torchemo.learners.gradient.parts.clustering import soft_assignment as soft_assignment
from torchemo.learners.gradient.parts.clustering import soft_clusters as soft_clusters
from torchemo.learners.gradient.parts.embedding import Embedding as Embedding
from torchemo.learners.gradient.parts.embedding import ImageEmbedding as ImageEmbedding
from torchemo.learners.gradient.parts.embedding import PointEmbedding as PointEmbedding
from torchemo.learners.gradient.parts.gate import Gates as Gates
