"""The log of a run: whole lines only, copies that may fail, and a past that can be returned to."""

import contextlib
import hashlib
import json
import os
import random
import sys
import types

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchemo.core.errors import ConfigError, DataError, ResourceError
from torchemo.runs.events import (
    Cut,
    EventLog,
    JsonLines,
    Sink,
    cpu_seconds,
    plain,
    read,
    truncate_after,
)
from torchemo.runs.sinks import TensorBoard, WeightsAndBiases
from torchemo.runs.storage.seal import with_digest


def write_log(path, steps):
    with EventLog(JsonLines(path), clock=lambda: 5.0) as log:
        for step in steps:
            log.emit("train", step, fields={"loss": step / 3})


class Recorder:
    def __init__(self):
        self.seen = []

    def write(self, event):
        self.seen.append(event)

    def flush(self):
        self.seen.append("flush")

    def close(self):
        self.seen.append("close")


class Broken:
    def __init__(self):
        self.calls = 0

    def write(self, event):
        self.calls += 1
        raise ConnectionError("no network")

    flush = close = lambda self: self.write({})


def test_events_are_plain_objects_with_event_step_and_time(tmp_path):
    path = tmp_path / "events.jsonl"
    write_log(path, [1, 2])
    plain_text = json.dumps({"event": "train", "step": 1, "time": 5.0, "loss": 1 / 3})
    before = hashlib.sha256(b"").hexdigest()[:8]
    own = hashlib.sha256((plain_text + before).encode()).hexdigest()[:16]
    first, second = path.read_bytes().splitlines(keepends=True)
    assert first.decode() == f'{plain_text[:-1]}, "digest": "{own}{before}"}}\n'
    assert second.endswith(hashlib.sha256(first).hexdigest()[:8].encode() + b'"}\n')
    assert [event["step"] for event in read(path)] == [1, 2]
    assert path.read_bytes().endswith(b"\n")


def test_every_event_is_one_write_at_the_end_of_the_file(tmp_path, monkeypatch):
    path = tmp_path / "events.jsonl"
    real, writes = os.write, []
    monkeypatch.setattr(os, "write", lambda h, d: writes.append(bytes(d)) or real(h, d))
    write_log(path, [1, 2])
    write_log(path, [3])
    assert writes == path.read_bytes().splitlines(keepends=True)
    assert len(writes) == 3


def test_tensors_arrays_and_numbers_that_json_lacks_are_written_plainly(tmp_path):
    fields = {
        "t": torch.tensor(2.5),
        "v": torch.arange(3),
        "a": np.float32(0.5),
        "bad": [float("nan"), float("inf"), -float("inf"), torch.tensor(float("nan"))],
        "deep": {"x": (1, None, True)},
    }
    with EventLog(JsonLines(tmp_path / "log")) as log:
        log.emit("eval", 3, fields=fields)

    def refuse(text):
        raise AssertionError(text)

    event = json.loads((tmp_path / "log").read_text(), parse_constant=refuse)
    assert event["t"] == 2.5
    assert event["v"] == [0, 1, 2]
    assert event["a"] == 0.5
    assert event["bad"] == ["NaN", "Infinity", "-Infinity", "NaN"]
    assert event["deep"] == {"x": [1, None, True]}
    assert np.isnan(float(event["bad"][0]))


def test_fields_cannot_hide_what_every_event_has(tmp_path):
    with EventLog(JsonLines(tmp_path / "log")) as log, pytest.raises(ConfigError, match="'step'"):
        log.emit("train", 1, fields={"step": 2})
    assert read(tmp_path / "log") == []


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(1, 40))
def test_law_a_log_cut_anywhere_reads_as_its_whole_lines_and_can_be_continued(
    tmp_path_factory, cut
):
    path = tmp_path_factory.mktemp("log") / "events.jsonl"
    write_log(path, [1, 2, 3])
    os.truncate(path, path.stat().st_size - cut)
    assert [event["step"] for event in read(path)] == [1, 2]
    write_log(path, [3, 4])
    assert [event["step"] for event in read(path)] == [1, 2, 3, 4]


@pytest.mark.parametrize("tail", [b"\0" * 4096, b"x" * 200_000, b'{"event": "train"', b'{"a": 1}'])
def test_what_a_power_cut_leaves_at_the_end_is_ignored_and_cut_off(tmp_path, tail):
    path = tmp_path / "events.jsonl"
    write_log(path, [1])
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    assert len(read(path)) == 1
    JsonLines(path).close()
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "line", ["", "{", "[1]", '{"event": "train"}', '{"event": 1, "step": 1}', "9"]
)
def test_damage_before_the_last_line_is_named_by_line(tmp_path, line):
    path = tmp_path / "events.jsonl"
    write_log(path, [1])
    path.write_text(path.read_text() + line + "\n" + path.read_text())
    with pytest.raises(DataError, match="line 2 should be a JSON object"):
        read(path)


def test_a_missing_log_cannot_be_read_and_need_not_be_cut(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        read(tmp_path / "log")
    assert truncate_after(tmp_path / "log", 3) == Cut(0)
    assert not (tmp_path / "log").exists()


@given(steps=st.lists(st.integers(0, 9), max_size=8).map(sorted), step=st.integers(-1, 10))
@settings(max_examples=60, deadline=None)
def test_law_cutting_after_a_step_keeps_the_bytes_of_everything_up_to_it(
    tmp_path_factory, steps, step
):
    folder = tmp_path_factory.mktemp("log")
    write_log(folder / "all", steps)
    write_log(folder / "some", [s for s in steps if s <= step])
    cut = truncate_after(folder / "all", step)
    assert cut.later == sum(s > step for s in steps)
    assert (folder / "all").read_bytes() == (folder / "some").read_bytes()


@given(at=st.integers(0, 10**6), bit=st.integers(0, 7))
@settings(max_examples=300, deadline=None)
def test_law_a_flipped_bit_is_noticed_and_costs_the_lines_it_is_in(tmp_path_factory, at, bit):
    path = tmp_path_factory.mktemp("log") / "events.jsonl"
    write_log(path, [1, 2, 3, 4])
    whole, data = read(path), bytearray(path.read_bytes())
    data[at % len(data)] ^= 1 << bit
    path.write_bytes(data)
    torn = not data.endswith(b"\n")
    if not torn:  # a torn last line was never written
        with pytest.raises(DataError, match="line"):
            read(path)
    cut = truncate_after(path, 4)
    assert cut.damaged or torn
    kept = read(path)
    assert 2 <= len(kept) <= 3
    assert all(event in whole for event in kept)
    if cut.damaged:
        assert cut.kept_as.read_bytes() == bytes(data)
        assert cut.later == 0


def test_a_log_of_an_earlier_version_has_no_digests_and_is_read(tmp_path):
    (tmp_path / "log").write_text('{"event": "train", "step": 1, "time": 2.0}\n')
    assert read(tmp_path / "log") == [{"event": "train", "step": 1, "time": 2.0}]


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize(
    ("old", "new"), [(b'"digest', b'"HYdigest'), (b'"}\n', b'x"}\n'), (b'"digest": "', b'"d": "')]
)
def test_a_line_whose_digest_has_a_damaged_name_or_length_is_none_of_an_earlier_version(
    tmp_path, number, old, new
):
    path = tmp_path / "events.jsonl"
    write_log(path, [1, 2, 3])
    lines = path.read_bytes().splitlines(keepends=True)
    lines[number] = lines[number].replace(old, new)
    path.write_bytes(b"".join(lines))
    with pytest.raises(DataError, match=f"line {number + 1} should be"):
        read(path)
    assert truncate_after(path, 3).damaged == (number + 1,)


def test_a_line_without_a_digest_after_one_that_has_one_is_damaged(tmp_path):
    path = tmp_path / "events.jsonl"
    write_log(path, [1])
    path.write_bytes(path.read_bytes() + b'{"event": "train", "step": 2, "time": 2.0}\n')
    with pytest.raises(DataError, match="line 2 should be"):
        read(path)


def test_what_follows_a_later_step_goes_with_it(tmp_path):
    write_log(tmp_path / "log", [1, 5, 2])
    assert truncate_after(tmp_path / "log", 2) == Cut(2, last=1, left=1)
    assert [event["step"] for event in read(tmp_path / "log")] == [1]


def test_cutting_also_removes_a_torn_last_line(tmp_path):
    write_log(tmp_path / "log", [1])
    whole = (tmp_path / "log").read_bytes()
    (tmp_path / "log").write_bytes(whole + b'{"event"')
    assert truncate_after(tmp_path / "log", 9) == Cut(0, last=1, left=1)
    assert (tmp_path / "log").read_bytes() == whole


def test_a_clock_that_jumps_back_does_not_reorder_the_log(tmp_path):
    times = iter([100.0, 50.0])
    with EventLog(JsonLines(tmp_path / "log"), clock=lambda: next(times)) as log:
        log.emit("train", 1)
        log.emit("train", 2)
    assert [event["step"] for event in read(tmp_path / "log")] == [1, 2]


def test_copies_get_every_event_flush_and_close(tmp_path):
    copy = Recorder()
    with EventLog(JsonLines(tmp_path / "log"), copies=[copy], clock=lambda: 1.0) as log:
        log.emit("train", 1, fields={"loss": 2.0})
        log.flush()
    event = {"event": "train", "step": 1, "time": 1.0, "loss": 2.0}
    assert copy.seen == [event, "flush", "close"]


def test_a_failing_copy_warns_once_and_stops_nothing(tmp_path):
    broken, copy = Broken(), Recorder()
    log = EventLog(JsonLines(tmp_path / "log"), copies=[broken, copy])
    with pytest.warns(UserWarning, match=r"Broken failed .*no network"):
        log.emit("train", 0)
    for step in range(1, 5):  # a second warning would be an error here
        log.emit("train", step)
    log.flush()
    log.close()
    assert len(read(tmp_path / "log")) == 5
    assert len(copy.seen) == 7
    assert broken.calls == 7


def test_a_failing_log_is_never_silent(tmp_path):
    with pytest.raises(ResourceError, match=r"cannot write .*missing/log: No such file"):
        JsonLines(tmp_path / "missing" / "log")


def test_a_log_can_be_closed_twice_and_flushes(tmp_path, monkeypatch):
    synced = []
    log = JsonLines(tmp_path / "log")
    monkeypatch.setattr(os, "fsync", synced.append)
    log.close()
    log.close()
    assert len(synced) == 1


def test_all_sinks_speak_the_same_protocol(tmp_path):
    log = JsonLines(tmp_path / "log")
    assert isinstance(log, Sink)
    assert isinstance(Recorder(), Sink)
    log.close()


def test_plain_leaves_plain_values_alone():
    value = {"a": [1, 2.5, "x", None, True, {"b": []}]}
    assert plain(value) == value


def fake_module(monkeypatch, name, **members):
    module = types.ModuleType(name)
    for member, value in members.items():
        setattr(module, member, value)
    monkeypatch.setitem(sys.modules, name, module)


def test_tensorboard_gets_a_point_per_number(monkeypatch, tmp_path):
    points = []

    class SummaryWriter:
        def __init__(self, log_dir):
            points.append(log_dir)

        def add_scalar(self, name, value, global_step):
            points.append((name, value, global_step))

        flush = close = lambda self: points.append("end")

    fake_module(monkeypatch, "torch.utils.tensorboard", SummaryWriter=SummaryWriter)
    with EventLog(JsonLines(tmp_path / "log"), copies=[TensorBoard("tb")]) as log:
        fields = {"loss": torch.tensor(0.5), "n": 3, "ok": True, "name": "x", "bad": float("nan")}
        log.emit("train", 7, fields=fields)
    assert points == ["tb", ("train/loss", 0.5, 7), ("train/n", 3.0, 7), "end"]


def test_weights_and_biases_gets_the_numbers_of_a_step(monkeypatch, tmp_path):
    calls = []
    run = types.SimpleNamespace(
        log=lambda numbers, step: calls.append((numbers, step)), finish=lambda: calls.append("end")
    )
    fake_module(
        monkeypatch, "wandb", init=lambda project, name: calls.append((project, name)) or run
    )
    sink = WeightsAndBiases("few-shot", name="first")
    with EventLog(JsonLines(tmp_path / "log"), copies=[sink]) as log:
        log.emit("eval", 2, fields={"accuracy": 0.25})
        log.flush()
    assert calls == [("few-shot", "first"), ({"eval/accuracy": 0.25}, 2), "end"]


@pytest.mark.parametrize(
    ("module", "make", "extra"),
    [
        ("torch.utils.tensorboard", lambda: TensorBoard("tb"), "tensorboard"),
        ("wandb", lambda: WeightsAndBiases("p", name="n"), "wandb"),
    ],
)
def test_a_missing_extra_says_how_to_get_it(monkeypatch, module, make, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"pip install 'torchemo\[{extra}\]'"):
        make()


@pytest.mark.parametrize(
    ("seen", "total"),
    [([], None), ([2.0, 5.0], 5.0), ([2.0, 5.0, 1.0, 4.0], 9.0), ([3.0, 1.0, 0.5], 4.5)],
)
def test_cpu_seconds_of_a_training_are_those_of_all_its_sessions(seen, total):
    log = [{"event": "step", "step": 1}]
    log += [{"event": "validation", "step": 1, "cpu_seconds": one} for one in seen]
    assert cpu_seconds(log) == total


def damaged_somehow(rng, data):
    """Flip, cut, overwrite or insert a few times; then maybe lose, double or swap whole lines."""
    data = bytearray(data)
    for _ in range(rng.choice((0, 1, 1, 2, 20))):
        at, way = rng.randrange(len(data) or 1), rng.randrange(4)
        if way == 0 and data:
            data[at] ^= 1 << rng.randrange(8)
        elif way == 1:
            del data[at : at + rng.randrange(1, 64)]
        elif way == 2:
            data[at : at + 8] = rng.choice((b"\xff", b"\0", b"\x7f")) * rng.choice((1, 4, 8))
        else:
            data[at:at] = data[at : at + rng.randrange(64)] * rng.randrange(1, 5)
    lines = bytes(data).splitlines(keepends=True)
    way, at = rng.randrange(6), rng.randrange(len(lines) or 1)
    if lines and way == 0:
        del lines[at]
    elif lines and way == 1:
        lines.insert(rng.randrange(len(lines)), lines[at])
    elif lines and way == 2:
        lines.append(lines.pop(at))
    return b"".join(lines)


@pytest.mark.parametrize("start", [0, 1000, 1256])
def test_law_no_event_appears_vanishes_or_moves_without_a_word(tmp_path, start):
    path = tmp_path / "events.jsonl"
    write_log(path, [1, 2, 3, 4])
    whole, data = read(path), path.read_bytes()
    for seed in range(start, start + 200):
        path.write_bytes(changed := damaged_somehow(random.Random(seed), data))
        with contextlib.suppress(DataError):
            assert read(path) == whole[: len(read(path))], seed
        cut = truncate_after(path, 4)
        left = read(path)  # a log that was put in order reads without an error
        assert all(event in whole for event in left), seed
        said = cut.damaged or cut.gaps or cut.last != 4
        assert left == whole or said, (seed, changed)


def test_a_log_goes_on_after_lines_of_earlier_versions(tmp_path):
    path, old = tmp_path / "log", {"event": "train", "step": 1, "time": 2.0}
    text = json.dumps({**old, "step": 2})
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    path.write_text(f'{json.dumps(old)}\n{text[:-1]}, "digest": "{digest}"}}\n')
    write_log(path, [3, 4])
    assert [event["step"] for event in read(path)] == [1, 2, 3, 4]
    path.write_text(json.dumps(old) + "\n")
    write_log(path, [2, 3])
    assert [event["step"] for event in read(path)] == [1, 2, 3]
    path.write_bytes(path.read_bytes().replace(b'"step": 1', b'"step": 0'))
    with pytest.raises(DataError, match="line 1 should be"):
        read(path)
    assert truncate_after(path, 3).damaged == (1,)


def test_a_run_of_today_has_no_line_without_a_digest(tmp_path):
    path, line = tmp_path / "events.jsonl", '{"event": "train", "step": 1, "time": 2.0}\n'
    path.write_text(line)
    assert len(read(path)) == 1
    (tmp_path / "environment.json").write_text(json.dumps(with_digest({"python": "3.11"})))
    with pytest.raises(DataError, match="line 1 should be"):
        read(path)
    assert truncate_after(path, 1).damaged == (1,)


def test_a_missing_line_is_told_and_the_log_is_linked_anew(tmp_path):
    path = tmp_path / "log"
    write_log(path, [1, 2, 3])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[2])
    with pytest.raises(DataError, match="lines before line 2 are missing"):
        read(path)
    cut = truncate_after(path, 3)
    assert (cut.gaps, cut.damaged) == ((2,), ())
    assert cut.kept_as.read_bytes() == lines[0] + lines[2]
    write_log(path, [4])
    assert [event["step"] for event in read(path)] == [1, 3, 4]


def test_a_last_line_that_lost_its_end_is_damage_where_its_step_was_saved(tmp_path):
    path = tmp_path / "log"
    write_log(path, [1, 2])
    torn = path.read_bytes()[:-1] + b"\x0b"
    path.write_bytes(torn)
    assert truncate_after(path, 1) == Cut(0, last=1, left=1)  # a crash tore it
    path.write_bytes(torn)
    assert truncate_after(path, 2).damaged == (2,)


@pytest.mark.timeout(20)
def test_a_pipe_in_place_of_the_log_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "log")
    with pytest.raises(DataError, match="cannot be read: not a regular file"):
        read(tmp_path / "log")
    with pytest.raises(DataError, match="not a regular file"):
        truncate_after(tmp_path / "log", 1)
