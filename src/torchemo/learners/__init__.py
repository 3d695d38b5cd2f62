"""Learners: one paper, one file, one line here."""

from torchemo.config.registry import Registry

LEARNERS = Registry(
    "learner",
    "learner",
    {
        "maml": "torchemo.learners.gradient.maml:MAML",
        "fomaml": "torchemo.learners.gradient.maml:FOMAML",
        "anil": "torchemo.learners.gradient.anil:ANIL",
        "boil": "torchemo.learners.gradient.boil:BOIL",
        "meta-sgd": "torchemo.learners.gradient.meta_sgd:MetaSGD",
        "reptile": "torchemo.learners.gradient.reptile:Reptile",
        "proto-maml": "torchemo.learners.gradient.proto_maml:ProtoMAML",
        "maml++": "torchemo.learners.gradient.maml_plus_plus:MAMLPlusPlus",
        "arml": "torchemo.learners.gradient.arml:ARMLLearner",
        "hsml": "torchemo.learners.gradient.hsml:HSMLLearner",
        "tsa-maml": "torchemo.learners.gradient.tsa_maml:TSAMAML",
        "musml": "torchemo.learners.gradient.musml:MUSML",
        "bmg": "torchemo.learners.gradient.bmg:BMG",
        "mtl": "torchemo.learners.transfer.mtl:MTL",
        "protonet": "torchemo.learners.metric.protonet:ProtoNet",
        "matchingnet": "torchemo.learners.metric.matchingnet:MatchingNet",
        "metaoptnet-ridge": "torchemo.learners.metric.ridge:MetaOptNetRidge",
        "metaoptnet-svm": "torchemo.learners.metric.svm:MetaOptNetSVM",
        "nearest-mean": "torchemo.learners.metric.nearest_mean:NearestMean",
        "can": "torchemo.learners.metric.can:CAN",
        "ctm": "torchemo.learners.metric.ctm:CTM",
        "dynamic-fs": "torchemo.learners.metric.dynamic_fs:DynamicFS",
        "tadam": "torchemo.learners.metric.tadam:TADAM",
        "relationnet": "torchemo.learners.metric.relationnet:RelationNet",
        "tapnet": "torchemo.learners.metric.tapnet:TapNet",
        "snail": "torchemo.learners.metric.snail:SNAIL",
        "hvm": "torchemo.learners.metric.hvm:HVM",
        "variational-fsl": "torchemo.learners.metric.variational_fsl:VariationalFSL",
    },
    group="torchemo.learners",
)
