"""Parts of learners that look at a task before they start on it: ARML and HSML are made of them.

A part is a frozen description with `init` (draw its tensors) and a call on them; a learner keeps the
tensors among its meta-parameters, behind the part's name and a slash.
"""

from torchemo.learners.parts.autoencoder import MeanAutoencoder as MeanAutoencoder
from torchemo.learners.parts.autoencoder import SequenceAutoencoder as SequenceAutoencoder
from torchemo.learners.parts.autoencoder import SetAutoencoder as SetAutoencoder
from torchemo.learners.parts.clustering import soft_assignment as soft_assignment
from torchemo.learners.parts.clustering import soft_clusters as soft_clusters
from torchemo.learners.parts.embedding import Embedding as Embedding
from torchemo.learners.parts.embedding import ImageEmbedding as ImageEmbedding
from torchemo.learners.parts.embedding import PointEmbedding as PointEmbedding
from torchemo.learners.parts.gate import Gates as Gates
