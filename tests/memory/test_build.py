"""Options become memories: every name is reachable, contradictions are refused with their remedy."""

import pytest
import torch
from torch.nn.functional import normalize

from tests.learners.metric.problems import METRIC
from torchemo.config.registry import Part
from torchemo.core.errors import ConfigError
from torchemo.core.tree import expand
from torchemo.core.types import Batch, Episode, TaskShape
from torchemo.learners import LEARNERS
from torchemo.learners.build import build_learner
from torchemo.learners.hosting import host
from torchemo.memory import MEMORIES
from torchemo.memory.aggregators import AGGREGATORS
from torchemo.memory.build import RATE, NoMemory, head_names, remembered_shapes
from torchemo.memory.controllers import CONTROLLERS
from torchemo.memory.emo import EMO, EMOOptions
from torchemo.memory.keys import KEYS
from torchemo.memory.offsets import OffsetMemory
from torchemo.memory.search import INDICES
from torchemo.models import MLP, Conv4
from torchemo.training.step import outer_step

IMAGES = TaskShape("classification", (3, 16, 16), 3, base_classes=6)
POINTS = TaskShape("regression", (1,), 1, n_shot=5)
NET = Conv4(3, image_size=16, filters=4)
KEY = Part("transformer", {"layers": 1, "dim": 8, "heads": 2, "ff": 8})
PAIRS = KEY.set(embedder="pairs")
CLASSES = ("proto-maml", *METRIC)
"""Learners that need classes."""


def images(tasks=2):
    g = torch.Generator().manual_seed(0)
    y = torch.arange(3).expand(tasks, 3).contiguous()
    return Episode(*(Batch(torch.rand(tasks, 3, 3, 16, 16, generator=g), y) for _ in range(2)))


def points(tasks=2):
    g = torch.Generator().manual_seed(0)
    rand = lambda: torch.randn(tasks, 5, 1, generator=g)  # noqa: E731
    return Episode(Batch(rand(), rand()), Batch(rand(), rand()))


def learner_of(name="maml", tasks=IMAGES, **options):
    """Make a learner for images or points; options of BMG are those of the learner underneath."""
    if name == "bmg":
        options = {"base": Part("maml", options)}
    model = NET if tasks.kind == "classification" else MLP(1)
    return build_learner(Part(name, options), model, tasks)


def made(learner="maml", tasks=IMAGES, *, memory="gradients", **options):
    """Make a memory with these options for a learner, by its name or itself."""
    chosen = learner_of(learner, tasks) if isinstance(learner, str) else learner
    kind, whole = MEMORIES.resolve(Part(memory, {"capacity": 5, "key": KEY, **options}))
    return kind.build(whole, host(chosen), tasks)


def two_steps(learner, memory, episode):
    """Remember a batch, then use what was remembered."""
    params = learner.init(torch.Generator().manual_seed(1))
    for _ in range(2):
        step = outer_step(learner, params, episode, memory=memory)
        memory.remember(step.recall, step.values, slot_key_gradient=step.slot_key_gradient)
    assert step.recall.m > 0 or memory.offsets_start
    assert all(g.isfinite().all() for g in step.gradients.values())
    return step


# -- every learner -----------------------------------------------------------------------------------


def one_step(name):
    return {} if name in METRIC else {"steps": 1}


@pytest.mark.parametrize("name", [n for n in LEARNERS if n not in METRIC])
def test_every_learner_with_an_inner_loop_runs_with_emo_on_images(name):
    learner = learner_of(name, **one_step(name))
    two_steps(learner, made(learner), images())


@pytest.mark.parametrize("name", [n for n in LEARNERS if n not in CLASSES])
def test_every_learner_runs_with_emo_on_regression(name):
    learner = learner_of(
        name, POINTS, steps=1, **({} if name == "meta-sgd" else {"inner_lr": 0.01})
    )
    two_steps(learner, made(learner, POINTS, key=PAIRS), points())


@pytest.mark.parametrize("name", LEARNERS)
def test_every_learner_runs_with_offsets_on_images(name):
    learner = learner_of(name, **one_step(name))
    memory = made(learner, memory="offsets", warmup=1, slot_lr=0.1)
    step = two_steps(learner, memory, images())
    assert step.recall.m == 5
    assert any(value.any() for value in memory.store.values.values())


@pytest.mark.parametrize("name", METRIC)
def test_a_learner_without_an_inner_loop_has_no_gradients_to_join(name):
    learner = learner_of(name)
    assert not host(learner).inner_loop
    with pytest.raises(ConfigError, match="takes no gradient steps") as caught:
        made(learner)
    assert "offsets" in caught.value.hint
    assert learner.title in caught.value.message


# -- every part --------------------------------------------------------------------------------------


def test_the_registry_names_every_memory():
    assert {"none": NoMemory, "gradients": EMO, "offsets": OffsetMemory} == MEMORIES
    assert NoMemory.build(None, host(learner_of()), IMAGES, seed=0, train_steps=None) is None


@pytest.mark.parametrize("kind", AGGREGATORS)
@pytest.mark.parametrize("controller", CONTROLLERS)
def test_every_aggregator_and_controller_can_be_named(kind, controller):
    learner = learner_of(steps=1)
    options = {"layers": 1} if kind == "gate" else {}
    emo = made(learner, capacity=3, aggregator=Part(kind, options), controller=Part(controller))
    assert type(emo.aggregator) is AGGREGATORS[kind]
    assert type(emo.store.controller) is CONTROLLERS[controller]
    two_steps(learner, emo, images())


@pytest.mark.parametrize("index", [n for n in INDICES if n != "approximate"])
@pytest.mark.parametrize("memory", ["gradients", "offsets"])
def test_every_index_can_be_named(memory, index):
    assert type(made(memory=memory, index=index).retrieval.index) is INDICES[index]


@pytest.mark.parametrize("content", ["first", "last", "mean", "per_step", "query", "meta"])
@pytest.mark.parametrize("align", ["none", "drop", "hungarian"])
def test_every_value_content_and_alignment_can_be_remembered(content, align):
    learner = learner_of(steps=2)
    emo = made(learner, content=content, head_align=align, memory_steps="all")
    emo.recall_step = "always"
    two_steps(learner, emo, images())
    head = {n for n in emo.store.values if n.startswith("head")}
    assert bool(head) == (align != "drop")


@pytest.mark.parametrize("memory", ["gradients", "offsets"])
def test_a_memory_of_scales_and_shifts_holds_and_moves_nothing_else(memory):
    learner = learner_of(steps=1, adapt_bn=memory == "gradients")
    own = {"content": "meta"} if memory == "gradients" else {"warmup": 1, "slot_lr": 0.1}
    chosen = made(learner, memory=memory, capacity=3, tensors="norm", **own)
    assert remembered_shapes(host(learner), "meta", tensors="norm").keys() == set(NET.norm)
    two_steps(learner, chosen, images())
    assert chosen.store.values.keys() == set(NET.norm)
    if memory == "offsets":
        offset = chosen.offset(chosen.recall(normalize(torch.randn(2, 8), dim=1)))
        start = expand(NET.init(torch.Generator()), 2)
        moved = {n: start[n] + offset[n] for n in offset}
        assert {n for n in moved if not torch.equal(moved[n], start[n])} == set(NET.norm)


def test_what_is_remembered_of_a_task():
    network = {n: p.shape for n, p in NET.init(torch.Generator()).items()}
    maml, anil = host(learner_of()), host(learner_of("anil"))
    head = {n: network[n] for n in NET.head}
    adapted = {n: s for n, s in network.items() if n not in NET.norm}
    assert remembered_shapes(maml, "meta") == network
    assert remembered_shapes(maml, "first") == adapted
    assert remembered_shapes(anil, "first") == head
    assert remembered_shapes(maml, "first", drop_head=True) == {
        n: s for n, s in adapted.items() if n not in head
    }
    rates = host(learner_of("meta-sgd", rate_memory=0.1))
    assert remembered_shapes(rates, "first") == adapted | {RATE + n: adapted[n] for n in adapted}
    assert head_names(rates) == (*NET.head, *(RATE + n for n in NET.head))
    without = remembered_shapes(rates, "first", drop_head=True)
    assert not set(head_names(rates)) & without.keys()


@pytest.mark.parametrize(
    "key",
    [
        Part("mean", {"dim": 8}),
        Part("statistics"),
        Part("learned-statistics", {"dim": 8}),
        Part("transformer", {"embedder": "shared", "layers": 1, "dim": 8, "heads": 2}),
        Part("transformer", {"embedder": "frozen_random", "layers": 1, "dim": 8, "heads": 2}),
        Part("transformer", {"use_labels": True, "layers": 1, "dim": 8, "heads": 2}),
    ],
    ids=lambda k: "-".join([k.name, *map(str, k.options.values())][:2]),
)
def test_every_key_network_can_be_named(key):
    learner = learner_of(steps=1)
    emo = made(learner, key=key)
    assert type(emo.encoder) is KEYS[key.name]
    two_steps(learner, emo, images())


@pytest.mark.parametrize("memory", ["gradients", "offsets"])
@pytest.mark.parametrize(
    "part", [Part("arml"), Part("hsml"), Part("bmg", {"base": Part("arml")})], ids=lambda p: p.name
)
def test_a_learner_that_describes_its_tasks_can_give_the_keys(part, memory):
    learner = build_learner(part, NET, IMAGES)
    chosen = made(learner, memory=memory, key=Part("learner"))
    assert chosen.encoder is None
    step = two_steps(learner, chosen, images())
    assert step.recall.keys.shape[1] == chosen.store.key_dim == host(learner).key_dim


def test_offsets_with_and_without_novelty():
    learner = learner_of(steps=1)
    for novelty, expected in ((0.0, 2), (None, 5)):
        memory = made(learner, memory="offsets", warmup=2)
        memory.novelty = novelty
        two_steps(learner, memory, images())
        # Novel tasks claim slots of their own (each twice, at distance 0 the second time);
        # otherwise all slots are seeded from past keys after the warm-up.
        assert len(memory.store) == expected


@pytest.mark.parametrize(
    ("steps", "train_steps", "warmup"),
    [("joint", 50, 7), ("same", 50, 50), (20, 50, 50), ("same", None, 7)],
)
def test_slots_that_train_after_the_learner_are_seeded_when_it_is_frozen(
    steps, train_steps, warmup
):
    kind, options = MEMORIES.resolve(Part("offsets", {"steps": steps, "warmup": 7, "key": KEY}))
    memory = kind.build(options, host(learner_of()), IMAGES, train_steps=train_steps)
    assert memory.warmup == memory.startup == memory.seeded_at == warmup


# -- options reach their parts -------------------------------------------------------------------------


def test_the_summed_conventions_scale_rates_and_values():
    learner = learner_of(inner_loss="n_way")
    assert learner.loop.loss_scale == 3
    shape = TaskShape("classification", (3, 16, 16), 3, n_shot=5)
    scales = {"own": 1, "sum": 15, "n_way": 3}
    for reduction, scale in scales.items():
        assert made(learner, shape, reduction=reduction).value_scale == scale
        for content in ("query", "meta"):
            assert made(learner, shape, reduction=reduction, content=content).value_scale == 1


def test_key_training_decides_whether_the_outer_loss_reaches_the_keys():
    learner = learner_of(steps=1)
    for training, weights, reached in (
        ("outer", "softmax", True),
        ("outer", "uniform", False),
        ("self_recognition", "softmax", False),
        ("none", "softmax", False),
    ):
        emo = made(learner, key=KEY.set(training=training), weights=weights)
        step = two_steps(learner, emo, images())
        assert any(n.startswith("encoder") for n in step.memory_gradients) == reached


@pytest.mark.parametrize("memory", ["gradients", "offsets"])
def test_shared_options_reach_their_parts(memory, tmp_path):
    chosen = made(
        memory=memory,
        capacity=7,
        k=3,
        null_distance=1.0,
        recall_dropout=0.25,
        control="random_values",
        skip_unfamiliar=0.9,
        value_dtype="float64",
        values_dir=str(tmp_path),
    )
    store, retrieval = chosen.store, chosen.retrieval
    assert (store.capacity, store.key_dim, store.value_dtype) == (7, 8, torch.float64)
    assert (store.values_dir, retrieval.k, retrieval.weights) == (tmp_path, 3, "softmax")
    assert retrieval.null_logit_distance.item() == 1.0
    assert (chosen.recall_dropout, chosen.control) == (0.25, "random_values")
    assert (chosen.skip_unfamiliar.share, chosen.skip_unfamiliar.keys.shape[1]) == (0.9, 8)
    assert chosen.head == head_names(host(learner_of()))


def test_options_of_each_memory_reach_it():
    emo = made(value_clip=2.0, memory_steps=0.5, scope="shared", head_align="hungarian")
    assert (emo.value_clip, emo.memory_steps, emo.head_align, emo.n_way) == (
        2.0,
        0.5,
        "hungarian",
        3,
    )
    offsets = made(memory="offsets", slot_lr=0.5, slot_decay=0.1, skip_unhelpful=0.2)
    assert (offsets.slots.lr, offsets.slots.decay) == (0.5, 0.1)
    assert (offsets.skip_unhelpful.least, len(offsets.skip_unhelpful.failed)) == (0.2, 5)


@pytest.mark.parametrize("memory", ["gradients", "offsets"])
def test_a_memory_is_a_function_of_its_options_and_the_seed(memory):
    kind, options = MEMORIES.resolve(Part(memory, {"key": KEY}))
    first, again, other = (
        kind.build(options, host(learner_of()), IMAGES, seed=seed).state_dict()
        for seed in (0, 0, 1)
    )
    assert all(torch.equal(first[n], again[n]) for n in first)
    drawn = [n for n in first if n.startswith("encoder") and first[n].ndim > 1]
    assert drawn
    assert not any(torch.equal(first[n], other[n]) for n in drawn)


@pytest.mark.parametrize("memory", ["gradients", "offsets"])
def test_a_memory_can_be_made_in_double_precision(memory):
    kind, options = MEMORIES.resolve(Part(memory, {"key": KEY}))
    chosen = kind.build(options, host(learner_of()), IMAGES, dtype=torch.float64)
    assert {p.dtype for p in chosen.parameters()} == {torch.float64}
    assert chosen.store.keys.dtype == torch.float64


def test_the_paper_s_choices_are_options():
    kind, options = MEMORIES.resolve(Part("gradients"))
    assert kind is EMO
    assert options == EMOOptions()
    assert (options.aggregator, options.controller) == (Part("sum"), Part("lru"))


# -- contradictions ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: made(key=KEY.set(unit=False)), "unit keys"),
        (lambda: made(memory="offsets", weights="uniform"), "softmax"),
        (lambda: made(memory="offsets", index="approximate"), "approximate"),
        (lambda: made(memory="offsets", steps="same", recall_dropout=0.2), "recall_dropout 0.2"),
        (lambda: made(memory="offsets", steps=9, recall_dropout=0.2), "memory.steps '9'"),
        (lambda: made(memory="offsets", content="first"), "content"),
        (lambda: made(memory="offsets", head_align="hungarian"), "head_align"),
        (lambda: made(memory="offsets", scope="group"), "scope"),
        (lambda: made(memory="offsets", value_dtype="bfloat16"), "float32"),
        (lambda: made(steps="same"), "steps"),
        (lambda: made(steps=5), "steps"),
        (lambda: made(rekey_every=5), "rekey_every"),
        (lambda: made("maml", POINTS), "pairs"),
        (lambda: made(key=PAIRS), "regression"),
        (lambda: made("anil", head_align="drop"), "nothing is left"),
        (lambda: made(tensors="norm"), "nothing is left.*norm"),
        (
            lambda: remembered_shapes(host(learner_of("anil")), "first", drop_head=True),
            "nothing is left",
        ),
        (lambda: made("musml", tensors="norm"), "nothing is left.*norm"),
        (lambda: made("musml", content="query"), "no query gradient"),
        (lambda: made(content="meta", tensors="norm"), "not adapted"),
        (lambda: made("anil", content="meta", head_align="drop"), "not adapted"),
        (lambda: made("reptile", aggregator=Part("gated")), "Reptile has no outer gradient"),
        (
            lambda: made(learner_of("meta-sgd", rate_memory=0.1), content="meta"),
            "inner rates",
        ),
        (lambda: made(learner_of("meta-sgd", rate_memory=0.1), memory="offsets"), "inner rates"),
        (lambda: made(scope="group"), "groups tasks"),
        (lambda: made(key=Part("learner")), "describes its tasks"),
        (lambda: made(capacity=-1), "capacity"),
        (lambda: made(key=Part("mean", {"use_labels": True})), "use_labels"),
        (lambda: made("maml", POINTS, key=PAIRS.set(use_labels=True)), "use_labels is for classes"),
        (lambda: made(key=Part("learned-statistics", {"unit": False})), "unit"),
        (lambda: made("tsa-maml", scope="group", index="random"), "searched exactly"),
        (lambda: made("tsa-maml", scope="group", aggregator=Part("mean")), "sum and gated"),
        (lambda: made(head_align="hungarian", content="frist"), "content"),
        (lambda: made("maml", POINTS, key=PAIRS, head_align="hungarian"), "n_way"),
    ],
)
def test_contradictions_are_refused_with_their_remedy(make, words):
    with pytest.raises(ConfigError, match=words):
        make()
