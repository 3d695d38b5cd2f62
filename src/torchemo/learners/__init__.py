"""Learners: one paper, one file."""

from torchemo.learners.gradient.anil import anil as anil
from torchemo.learners.gradient.arml import ARML as ARML
from torchemo.learners.gradient.bmg import BMG as BMG
from torchemo.learners.gradient.boil import boil as boil
from torchemo.learners.gradient.hsml import HSML as HSML
from torchemo.learners.gradient.loop import InnerLoop as InnerLoop
from torchemo.learners.gradient.maml import MAML as MAML
from torchemo.learners.gradient.maml import fomaml as fomaml
from torchemo.learners.gradient.maml_plus_plus import MAMLPlusPlus as MAMLPlusPlus
from torchemo.learners.gradient.meta_sgd import MetaSGD as MetaSGD
from torchemo.learners.gradient.musml import MUSML as MUSML
from torchemo.learners.gradient.proto_maml import ProtoMAML as ProtoMAML
from torchemo.learners.gradient.reptile import Reptile as Reptile
from torchemo.learners.gradient.task_gated import TaskGated as TaskGated
from torchemo.learners.gradient.tsa_maml import TSAMAML as TSAMAML
from torchemo.learners.learner import Learner as Learner
from torchemo.learners.learner import Traits as Traits

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
