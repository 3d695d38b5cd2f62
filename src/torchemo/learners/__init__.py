"""Learners: one paper, one file."""

from torchemo.learners.anil import anil as anil
from torchemo.learners.arml import ARML as ARML
from torchemo.learners.bmg import BMG as BMG
from torchemo.learners.boil import boil as boil
from torchemo.learners.hsml import HSML as HSML
from torchemo.learners.learner import Learner as Learner
from torchemo.learners.learner import Traits as Traits
from torchemo.learners.loop import InnerLoop as InnerLoop
from torchemo.learners.maml import MAML as MAML
from torchemo.learners.maml import fomaml as fomaml
from torchemo.learners.maml_plus_plus import MAMLPlusPlus as MAMLPlusPlus
from torchemo.learners.meta_sgd import MetaSGD as MetaSGD
from torchemo.learners.musml import MUSML as MUSML
from torchemo.learners.proto_maml import ProtoMAML as ProtoMAML
from torchemo.learners.reptile import Reptile as Reptile
from torchemo.learners.task_gated import TaskGated as TaskGated
from torchemo.learners.tsa_maml import TSAMAML as TSAMAML

LEARNERS = {
    "maml": MAML,
    "fomaml": fomaml,
    "anil": anil,
    "boil": boil,
    "meta-sgd": MetaSGD,
    "reptile": Reptile,
    "proto-maml": ProtoMAML,
    "maml++": MAMLPlusPlus,
    "arml": TaskGated,
    "hsml": TaskGated,
    "tsa-maml": TSAMAML,
    "musml": MUSML,
    "bmg": BMG,
}
"""Every learner by name; `torchemo.learners.build.build_learner` makes one.

ARML and HSML are readers of tasks for `TaskGated`, BMG goes over another learner.
"""
