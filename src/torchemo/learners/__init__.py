"""Learners: one paper, one file."""

from torchemo.learners.anil import anil as anil
from torchemo.learners.boil import boil as boil
from torchemo.learners.learner import Learner as Learner
from torchemo.learners.learner import Traits as Traits
from torchemo.learners.loop import InnerLoop as InnerLoop
from torchemo.learners.maml import MAML as MAML
from torchemo.learners.maml import fomaml as fomaml
from torchemo.learners.maml_plus_plus import MAMLPlusPlus as MAMLPlusPlus
from torchemo.learners.meta_sgd import MetaSGD as MetaSGD
from torchemo.learners.proto_maml import ProtoMAML as ProtoMAML
from torchemo.learners.reptile import Reptile as Reptile

LEARNERS = {
    "maml": MAML,
    "fomaml": fomaml,
    "anil": anil,
    "boil": boil,
    "meta-sgd": MetaSGD,
    "reptile": Reptile,
    "proto-maml": ProtoMAML,
    "maml++": MAMLPlusPlus,
}
"""Every learner by name; each is made from an `InnerLoop` and its own switches."""
