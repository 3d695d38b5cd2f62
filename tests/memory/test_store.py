"""The memory: what is written is what is read, refusals change nothing, states travel bit for bit."""

import hashlib
from dataclasses import fields

import pytest
import safetensors.torch
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.reference.controllers import ListClock, published_fifo, published_lru
from tests.reference.retrieval import nearest
from torchemo.core.errors import CheckpointError, ConfigError, MemoryWriteError, ShapeError
from torchemo.core.rng import generator_for
from torchemo.memory.controllers import FIFO, LRU, Clock
from torchemo.memory.recall import Retrieval
from torchemo.memory.slots import SlotAdam
from torchemo.memory.store import EpisodicMemory

DIM = 3
SHAPES = {"conv.weight": (2, 3), "conv.bias": (2,), "scale": ()}


def draw(tasks, *, seed=0, dtype=torch.float32):
    """Keys and values of some tasks."""
    g = generator_for(seed, "memory")
    keys = torch.randn(tasks, DIM, generator=g)
    return keys, {n: torch.randn(tasks, *s, generator=g, dtype=dtype) for n, s in SHAPES.items()}


def copy(state):
    return {name: tensor.clone() for name, tensor in state.items()}


def digest(module):
    """Hash names, dtypes, shapes and bytes of a whole state."""
    state = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        state.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        state.update(tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def used(capacity=3, *, tasks=5, notes=True, **options):
    """A memory with a past: written beyond its capacity, read, and aged."""
    memory = EpisodicMemory(capacity, DIM, **options)
    keys, values = draw(tasks)
    extra = {"domain": torch.arange(tasks), "prototypes": torch.rand(tasks, 2, 4)}
    memory.write(keys, values, notes=extra if notes else None)
    memory.touch(torch.tensor([[1, 0]]))
    memory.end_batch()
    return memory


# -- reading and writing ---------------------------------------------------------------------------


def test_what_is_written_is_what_is_read():
    memory = EpisodicMemory(5, DIM)
    keys, values = draw(4)
    assert memory.write(keys, values) == [0, 1, 2, 3]
    assert len(memory) == 4
    assert torch.equal(memory.keys[:4], keys)
    slots = torch.tensor([[3, 0], [2, 2]])
    read = memory.read(slots)
    assert list(read) == list(values)
    for name, value in values.items():
        assert torch.equal(read[name], torch.stack([value[[3, 0]], value[[2, 2]]]))


def test_a_full_memory_overwrites_the_victims_of_its_controller_in_task_order():
    memory = EpisodicMemory(3, DIM, controller=LRU())
    keys, values = draw(3)
    memory.write(keys, values)
    memory.touch(torch.tensor([[0]]))
    new_keys, new_values = draw(2, seed=1)
    assert memory.write(new_keys, new_values) == [1, 2]
    assert torch.equal(memory.keys, torch.stack([keys[0], new_keys[0], new_keys[1]]))
    assert torch.equal(memory.values["conv.bias"][1:], new_values["conv.bias"])


def test_one_batch_can_be_larger_than_the_memory():
    memory = EpisodicMemory(2, DIM)
    keys, values = draw(5)
    assert memory.write(keys, values) == [0, 1, 0, 1, 0]
    assert torch.equal(memory.keys, keys[[4, 3]])


def test_a_memory_keeps_copies_that_are_off_the_graph():
    memory = EpisodicMemory(2, DIM)
    keys, values = draw(2)
    before = keys.clone()
    keys.requires_grad_()
    values = {name: value.requires_grad_() for name, value in values.items()}
    memory.write(keys, {name: 2 * value for name, value in values.items()})
    with torch.no_grad():
        keys.zero_()
        values["conv.bias"].zero_()
    assert torch.equal(memory.keys, before)
    assert not memory.values["conv.bias"].requires_grad
    assert bool(memory.values["conv.bias"].any())
    memory.read(torch.tensor([[0]]))["conv.bias"].zero_()
    assert bool(memory.values["conv.bias"][0].any())


def test_an_empty_read_has_the_shape_of_its_values():
    memory = used()
    read = memory.read(torch.zeros(2, 0, dtype=torch.int64))
    assert {name: tuple(v.shape) for name, v in read.items()} == {
        name: (2, 0, *shape) for name, shape in SHAPES.items()
    }


def test_bfloat16_values_are_rounded_once_and_read_in_the_dtype_of_the_keys():
    memory = EpisodicMemory(2, DIM, value_dtype=torch.bfloat16)
    keys, values = draw(2)
    memory.write(keys, values)
    assert memory.values["conv.weight"].dtype == torch.bfloat16
    read = memory.read(torch.tensor([[1]]))["conv.weight"][0, 0]
    assert read.dtype == torch.float32
    assert torch.equal(read, values["conv.weight"][1].bfloat16().float())
    assert bool((read != values["conv.weight"][1]).any())


def test_float64_keys_and_values_keep_all_their_digits():
    memory = EpisodicMemory(2, DIM, value_dtype=torch.float64, key_dtype=torch.float64)
    keys, values = draw(2, dtype=torch.float64)
    memory.write(keys.double(), values)
    assert torch.equal(
        memory.read(torch.tensor([[1]]))["conv.weight"][0, 0], values["conv.weight"][1]
    )


def test_notes_stay_with_their_tasks():
    memory = EpisodicMemory(2, DIM)
    keys, values = draw(3)
    domain = torch.tensor([7, 8, 9])
    memory.write(keys, values, notes={"domain": domain})
    assert memory.read_notes(torch.tensor([[0, 1]]))["domain"].tolist() == [[9, 8]]
    assert memory.notes["domain"].dtype == torch.int64


def test_a_memory_without_slots_takes_everything_and_keeps_nothing():
    memory = EpisodicMemory(0, DIM)
    before = digest(memory)
    assert memory.write(*draw(3)) == []
    assert len(memory) == 0
    assert memory.read(torch.zeros(3, 0, dtype=torch.int64)) == {}
    assert digest(memory) == before


def test_a_memory_without_slots_refuses_bad_values_all_the_same():
    keys, values = draw(2)
    values["scale"][1] = torch.inf
    with pytest.raises(MemoryWriteError, match="task 1"):
        EpisodicMemory(0, DIM).write(keys, values)


def test_ages_count_remembered_batches():
    memory = EpisodicMemory(3, DIM)
    memory.write(*draw(1))
    assert memory.ages.tolist() == [0]
    memory.end_batch()
    memory.write(*draw(1))
    memory.end_batch()
    assert memory.ages.tolist() == [2, 1]


def test_rekeying_replaces_the_keys_of_filled_slots_and_nothing_else():
    memory = EpisodicMemory(4, DIM)
    memory.write(*draw(3))
    before = copy(memory.state_dict())
    fresh = torch.rand(3, DIM)
    memory.rekey(fresh)
    assert torch.equal(memory.keys[:3], fresh)
    after = memory.state_dict()
    assert all(torch.equal(after[n], before[n]) for n in before if n != "keys")


# -- generations -----------------------------------------------------------------------------------


def test_a_generation_counts_the_writes_of_a_slot():
    memory = EpisodicMemory(2, DIM)
    memory.write(*draw(3))
    assert memory.ledger.generation.tolist() == [2, 1]


def test_a_slot_overwritten_since_it_was_read_is_not_touched():
    memory = EpisodicMemory(3, DIM, controller=Clock(insert_ref=False))
    memory.write(*draw(3))
    slots = torch.tensor([[0, 1], [2, 0]])
    generations = memory.ledger.generation[slots]
    assert memory.write(*draw(1, seed=1)) == [0]
    memory.touch(slots, generations=generations)
    assert memory.ledger.referenced.tolist() == [False, True, True]
    assert memory.ledger.recalls.tolist() == [0, 1, 1]
    assert int(memory.ledger.now) == 4 + 2


def test_stale_reads_alone_are_no_event():
    memory = EpisodicMemory(1, DIM)
    memory.write(*draw(1))
    old = memory.ledger.generation[torch.tensor([[0]])]
    memory.write(*draw(1, seed=1))
    before = digest(memory)
    memory.touch(torch.tensor([[0]]), generations=old)
    assert digest(memory) == before


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (lambda k, v: v.pop("conv.bias"), ShapeError, r"missing \['conv.bias'\]"),
        (lambda k, v: v.update(other=torch.ones(2, 1)), ShapeError, r"unexpected \['other'\]"),
        (lambda k, v: v.update({"conv.bias": torch.ones(2, 9)}), ShapeError, "'conv.bias'.*9"),
        (lambda k, v: v.update({"conv.bias": torch.ones(3, 2)}), ShapeError, "'conv.bias'.*3"),
        (lambda k, v: v.clear(), ShapeError, "no value tensors"),
        (
            lambda k, v: v["conv.weight"][1].fill_(torch.nan),
            MemoryWriteError,
            "task 1.*'conv.weight'",
        ),
        (lambda k, v: v["scale"][1].fill_(-torch.inf), MemoryWriteError, "task 1.*'scale'"),
        (lambda k, v: k[1].fill_(torch.nan), MemoryWriteError, "task 1.*key"),
    ],
    ids=["missing", "extra", "shape", "tasks", "empty", "nan", "inf", "key"],
)
def test_a_refused_write_names_what_is_wrong_and_changes_nothing(change, error, says):
    memory = used(notes=False)
    before = digest(memory)
    keys, values = draw(2, seed=1)
    change(keys, values)
    with pytest.raises(error, match=says):
        memory.write(keys, values)
    assert digest(memory) == before


def test_the_first_write_is_checked_too():
    memory = EpisodicMemory(2, DIM)
    keys, values = draw(2)
    values["conv.bias"][0, 0] = torch.nan
    before = digest(memory)
    with pytest.raises(MemoryWriteError, match="task 0"):
        memory.write(keys, values)
    assert digest(memory) == before
    assert memory.values == {}


def test_keys_of_another_dimension_are_refused():
    memory = used(notes=False)
    before = digest(memory)
    _, values = draw(2)
    with pytest.raises(ShapeError, match=r"\[tasks, 3\], got \[2, 4\]"):
        memory.write(torch.zeros(2, 4), values)
    assert digest(memory) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_number_too_large_for_the_stored_format_is_not_finite(dtype):
    memory = EpisodicMemory(2, DIM, value_dtype=dtype)
    keys, values = draw(2, dtype=torch.float64)
    values["conv.bias"][1, 0] = 1e300
    with pytest.raises(MemoryWriteError, match=r"task 1.*'conv.bias'"):
        memory.write(keys, values)
    assert memory.values == {}


@pytest.mark.parametrize(
    ("notes", "error"),
    [
        ({"domain": torch.zeros(2, dtype=torch.int64)}, ShapeError),
        (None, ShapeError),
        (
            {"domain": torch.zeros(2, dtype=torch.int64), "prototypes": torch.zeros(2, 3, 4)},
            ShapeError,
        ),
        (
            {"domain": torch.zeros(1, dtype=torch.int64), "prototypes": torch.zeros(2, 2, 4)},
            ShapeError,
        ),
        (
            {
                "domain": torch.zeros(2, dtype=torch.int64),
                "prototypes": torch.full((2, 2, 4), torch.nan),
            },
            MemoryWriteError,
        ),
    ],
    ids=["missing", "none", "shape", "tasks", "nan"],
)
def test_notes_of_another_structure_are_refused(notes, error):
    memory = used(notes=True)
    before = digest(memory)
    with pytest.raises(error):
        memory.write(*draw(2, seed=1), notes=notes)
    assert digest(memory) == before


@pytest.mark.parametrize(
    "verb",
    [
        lambda m: m.write(*draw(1)),
        lambda m: m.touch(torch.tensor([[0]])),
        lambda m: m.step_slots(
            draw(1)[1], torch.tensor([[0]]), weights=torch.ones(1, 1), optimizer=SlotAdam()
        ),
        lambda m: m.seed(torch.eye(DIM), {n: torch.Size(s) for n, s in SHAPES.items()}),
        lambda m: m.rekey(torch.zeros(3, DIM)),
        lambda m: m.end_batch(),
    ],
    ids=["write", "touch", "step_slots", "seed", "rekey", "end_batch"],
)
def test_in_eval_mode_every_change_is_refused(verb):
    memory = used(notes=False).eval()
    before = digest(memory)
    with pytest.raises(MemoryWriteError, match="eval mode"):
        verb(memory)
    assert digest(memory) == before


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        (torch.zeros(2, DIM), ShapeError),
        (torch.zeros(3, DIM + 1), ShapeError),
        (torch.full((3, DIM), torch.nan), MemoryWriteError),
    ],
)
def test_rekeying_refuses_keys_that_do_not_fit(keys, error):
    memory = used()
    before = digest(memory)
    with pytest.raises(error):
        memory.rekey(keys)
    assert digest(memory) == before


@pytest.mark.parametrize(
    ("rows", "gradient", "error"),
    [
        ({"other": torch.ones(1, 2)}, None, ShapeError),
        (None, torch.zeros(2, DIM), ShapeError),
        (None, torch.full((3, DIM), torch.nan), MemoryWriteError),
    ],
    ids=["structure", "key-gradient-shape", "key-gradient-nan"],
)
def test_a_refused_consolidation_changes_nothing(rows, gradient, error):
    memory = used(notes=False)
    before = digest(memory)
    with pytest.raises(error):
        memory.step_slots(
            draw(1)[1] if rows is None else rows,
            torch.tensor([[0, 1]]),
            weights=torch.full((1, 2), 0.5),
            optimizer=SlotAdam(),
            key_gradient=gradient,
        )
    assert digest(memory) == before


@pytest.mark.parametrize(("capacity", "dim"), [(-1, 3), (2, 0)])
def test_impossible_sizes_are_refused(capacity, dim):
    with pytest.raises(ConfigError):
        EpisodicMemory(capacity, dim)


# -- saving ----------------------------------------------------------------------------------------


def plain(state):
    return copy(state)


def through_safetensors(state):
    return safetensors.torch.load(safetensors.torch.save(state))


def stepped(**options):
    memory = used(notes=False, **options)
    memory.step_slots(
        draw(1)[1],
        torch.tensor([[0, 2]]),
        weights=torch.tensor([[0.25, 0.75]]),
        optimizer=SlotAdam(),
        key_gradient=torch.ones(3, DIM),
    )
    return memory


BUILDS = {
    "used": used,
    "partly filled": lambda **o: used(9, **o),
    "bfloat16": lambda **o: used(value_dtype=torch.bfloat16, **o),
    "float64": lambda **o: used(value_dtype=torch.float64, key_dtype=torch.float64, **o),
    "stepped": stepped,
    "empty": lambda **o: EpisodicMemory(3, DIM, **o),
    "off": lambda **o: EpisodicMemory(0, DIM, **o),
}


def blank(memory):
    return EpisodicMemory(
        memory.capacity,
        DIM,
        controller=memory.controller,
        value_dtype=memory.value_dtype,
        key_dtype=memory.keys.dtype,
    )


@pytest.mark.parametrize("carrier", [plain, through_safetensors])
@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_a_state_survives_saving_and_loading_bit_for_bit(build, carrier):
    memory = build(controller=Clock())
    state = carrier(memory.state_dict())
    other = blank(memory)
    assert other.load_state_dict(state).missing_keys == []
    assert digest(other) == digest(memory)
    assert len(other) == len(memory)


def test_a_state_holds_every_tensor_of_the_memory():
    memory = stepped()
    state = memory.state_dict()
    assert torch.equal(state["keys"], memory.keys)
    assert {f"ledger.{f.name}" for f in fields(memory.ledger)} <= set(state)
    assert {f"values.{name}" for name in SHAPES} <= set(state)
    assert {"moments.steps", "moments.first.keys", "moments.second.values.conv.bias"} <= set(state)


@pytest.mark.parametrize("controller", [FIFO(), LRU(update_last=0.5), Clock()])
def test_a_loaded_memory_goes_on_as_the_saved_one_would_have(controller):
    memory = used(controller=controller)
    other = blank(memory)
    other.load_state_dict(copy(memory.state_dict()))
    extra = {"domain": torch.arange(4), "prototypes": torch.rand(4, 2, 4)}
    for one in (memory, other):
        one.touch(torch.tensor([[2, 0], [1, 2]]))
        one.write(*draw(4, seed=3), notes=extra)
        one.end_batch()
    assert digest(other) == digest(memory)


def test_a_loaded_memory_shares_no_storage_with_the_state():
    memory = used()
    state = copy(memory.state_dict())
    other = blank(memory)
    other.load_state_dict(state)
    before = digest(other)
    for tensor in state.values():
        tensor.zero_()
    assert digest(other) == before


@pytest.mark.parametrize(
    "build",
    [
        lambda: used(4),
        lambda: EpisodicMemory(3, DIM + 1),
        lambda: used(value_dtype=torch.bfloat16),
        lambda: used(key_dtype=torch.float64),
        lambda: used(notes=False),
        stepped,
    ],
    ids=["capacity", "key-dim", "value-dtype", "key-dtype", "notes", "moments-but-no-notes"],
)
def test_a_state_of_another_kind_of_memory_is_refused_and_changes_nothing(build):
    memory = used()
    before = digest(memory)
    with pytest.raises(CheckpointError, match="memory"):
        memory.load_state_dict(build().state_dict())
    assert digest(memory) == before


def test_a_state_of_another_network_is_refused_by_name():
    memory = used(notes=False)
    other = EpisodicMemory(3, DIM)
    other.write(torch.zeros(1, DIM), {"conv.weight": torch.ones(1, 5)})
    before = digest(memory)
    with pytest.raises(CheckpointError, match=r"conv\.bias"):
        memory.load_state_dict(other.state_dict())
    other = EpisodicMemory(3, DIM)
    other.write(torch.zeros(1, DIM), {n: torch.ones(1, *s, 1) for n, s in SHAPES.items()})
    with pytest.raises(CheckpointError, match=r"conv\.weight"):
        memory.load_state_dict(other.state_dict())
    assert digest(memory) == before


@pytest.mark.parametrize("name", ["keys", "ledger.hand", "values.scale", "moments.steps"])
def test_a_state_that_lacks_a_tensor_is_refused_by_name(name):
    memory = stepped()
    state = copy(memory.state_dict())
    del state[name]
    before = digest(memory)
    with pytest.raises(CheckpointError, match=name):
        memory.load_state_dict(state)
    assert digest(memory) == before


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("ledger.written", torch.zeros(4, dtype=torch.int64)),
        ("ledger.referenced", torch.zeros(3, dtype=torch.int64)),
        ("moments.first.keys", torch.zeros(3, DIM + 1)),
        ("values.scale", torch.zeros(2)),
        ("stray", torch.zeros(1)),
    ],
)
def test_a_damaged_state_is_refused_by_name_also_by_an_empty_memory(name, tensor):
    memory = blank(stepped())
    before = digest(memory)
    with pytest.raises(CheckpointError, match=name):
        memory.load_state_dict(copy(stepped().state_dict()) | {name: tensor})
    assert digest(memory) == before


def test_a_used_memory_can_go_back_to_an_empty_state():
    memory = used()
    memory.load_state_dict(EpisodicMemory(3, DIM).state_dict())
    assert len(memory) == 0
    assert digest(memory) == digest(EpisodicMemory(3, DIM))


# -- the whole machine against published caches ------------------------------------------------------


class MemoryMachine(RuleBasedStateMachine):
    """Write, recall and touch, save and load, evaluate; a plain cache says what should be where."""

    controller, reference, capacity = None, None, 0
    operations = 0

    @initialize()
    def start(self):
        self.memory = self.fresh()
        self.model = self.reference(self.capacity)
        self.items = 0
        self.open = []

    def fresh(self):
        return EpisodicMemory(self.capacity, 1, controller=self.controller)

    @rule(tasks=st.integers(1, 3))
    def write(self, tasks):
        items = list(range(self.items + 1, self.items + 1 + tasks))
        self.items += tasks
        keys = torch.tensor([[float(item * 7 % 11)] for item in items])
        written = self.memory.write(keys, {"item": torch.tensor(items, dtype=torch.float32)})
        assert written == [self.model.write(item) for item in items]
        self.count()

    @rule(key=st.integers(0, 10), k=st.integers(1, 6))
    def read(self, key, k):
        recall = self.recall(key, k)
        self.touch(recall)
        self.count()

    @rule(key=st.integers(0, 10), k=st.integers(1, 6))
    def read_now_touch_later(self, key, k):
        self.open.append((self.recall(key, k), list(self.model.content)))
        self.count()

    @precondition(lambda self: getattr(self, "open", None))
    @rule()
    def touch_late(self):
        recall, seen = self.open.pop(0)
        # What was overwritten in between must not count as recalled.
        alive = [s for s in recall.slots[0].tolist() if self.model.content[s] == seen[s]]
        self.memory.touch(recall.slots, generations=recall.generations)
        self.model.touch(alive)
        self.count()

    @rule()
    def save_and_load(self):
        state = copy(self.memory.state_dict())
        self.memory = self.fresh()
        self.memory.load_state_dict(state)
        self.count()

    @rule(key=st.integers(0, 10))
    def evaluate(self, key):
        before = digest(self.memory)
        self.memory.eval()
        self.recall(key, 3)
        with pytest.raises(MemoryWriteError):
            self.memory.write(torch.zeros(1, 1), {"item": torch.zeros(1)})
        self.memory.train()
        assert digest(self.memory) == before
        self.count()

    def recall(self, key, k):
        recall = Retrieval(k)(self.memory, torch.tensor([[float(key)]]))
        slot_keys = [[float(item * 7 % 11)] for item in self.model.content]
        assert recall.slots[0].tolist() == nearest([float(key)], slot_keys, k)
        if recall.m:
            items = recall.values["item"][0].tolist()
            assert items == [self.model.content[s] for s in recall.slots[0].tolist()]
        return recall

    def touch(self, recall):
        self.memory.touch(recall.slots, generations=recall.generations)
        self.model.touch(recall.slots[0].tolist())

    def count(self):
        type(self).operations += 1

    @invariant()
    def slots_hold_what_the_cache_holds(self):
        if hasattr(self, "memory"):
            n = len(self.memory)
            assert n == len(self.model.content) <= self.capacity
            kept = self.memory.values["item"][:n].tolist() if n else []
            assert kept == self.model.content


CACHES = {
    "fifo": (FIFO(), published_fifo),
    "lru": (LRU(), published_lru),
    "clock-1": (Clock(insert_ref=True), lambda t: ListClock(t, insert_ref=True)),
    "clock-0": (Clock(insert_ref=False), lambda t: ListClock(t, insert_ref=False)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CACHES)
def test_memory_and_controller_equal_a_plain_cache_over_thousands_of_operations(name):
    made, cache = CACHES[name]

    class Machine(MemoryMachine):
        controller, reference, capacity = made, staticmethod(cache), 4

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=30,
            stateful_step_count=100,
            deadline=None,
            derandomize=True,
            database=None,
        ),
    )
    assert Machine.operations >= 2500
