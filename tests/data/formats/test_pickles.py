"""Pickles of others: plain data come through, code never runs."""

import contextlib
import io
import os
import pickle
import pickletools
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchemo.core.errors import DataError
from torchemo.data.formats.pickles import read_pickle

DATA = {
    "image_data": np.arange(48, dtype=np.uint8).reshape(2, 4, 2, 3),
    "class_dict": {"n01": [0, 1], "n02": [2]},
    "labels": [np.int64(3), np.float32(0.5), 7, True, None, 2.5],
    "names": ("a", b"b", bytearray(b"c"), ""),
    "columns": np.asfortranarray(np.arange(6, dtype=">i4").reshape(2, 3)),
    "words": np.array(["wren", "jay"]),
    "letters": np.array([b"wren", b"jay"]),
    "big": 10**30,
    "empty": np.zeros((0, 3)),
    "none": b"",
}


def same(a, b):
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return set(a) == set(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return a == b


def stored(tmp_path, content):
    path = tmp_path / "set.pkl"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_data_come_through_every_protocol(tmp_path, protocol):
    data = dict(DATA)
    if protocol < 5:
        data["names"] = ("a", b"b", "")
    assert same(read_pickle(stored(tmp_path, pickle.dumps(data, protocol))), data)


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False)
        | st.text()
        | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner),
        max_leaves=10,
    ),
    st.integers(0, 5),
)
@settings(max_examples=60, deadline=None)
def test_any_plain_structure_survives(tmp_path_factory, data, protocol):
    path = stored(tmp_path_factory.mktemp("p"), pickle.dumps(data, protocol))
    assert same(data, read_pickle(path))


def test_a_file_of_python_2_is_read(tmp_path):
    """Written by hand as python 2 writes it: strings are bytes, arrays carry theirs in a string."""
    raw = bytes(range(250, 256))
    content = (
        b"\x80\x02}q\x00U\x04dataq\x01cnumpy.core.multiarray\n_reconstruct\nq\x02cnumpy\nndarray\nq\x03"
        b"K\x00\x85q\x04U\x01bq\x05\x87q\x06Rq\x07(K\x01K\x02K\x03\x86q\x08cnumpy\ndtype\nq\x09U\x02u1"
        b"q\x0aK\x00K\x01\x87q\x0bRq\x0c(K\x03U\x01|q\x0dNNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tq\x0e"
        b"b\x89U\x06" + raw + b"q\x0ftq\x10bs."
    )
    got = read_pickle(stored(tmp_path, content))
    assert same(got, {"data": np.frombuffer(raw, np.uint8).reshape(2, 3)})


class Runs:
    """A pickle of this makes a folder when it is loaded by the ordinary unpickler."""

    def __init__(self, canary, function=os.mkdir):
        self.canary, self.function = str(canary), function

    def __reduce__(self):
        return self.function, (self.canary,)


def object_array(content):
    array = np.empty(1, dtype=object)
    array[0] = content
    return array


def hostile(canary):
    place = str(canary).encode()
    text = struct.pack("<I", len(place)) + place
    yield "reduce", pickle.dumps(Runs(canary))
    yield "inside a dict", pickle.dumps({"data": np.zeros(2), "labels": [Runs(canary)]})
    yield "in an array of objects", pickle.dumps(object_array(Runs(canary)))
    yield "protocol 0", pickle.dumps(Runs(canary), 0)
    yield "global", b"cos\nmkdir\n(V" + place + b"\ntR."
    yield "instance", b"(V" + place + b"\nios\nmkdir\n."
    yield "object", b"(cos\nmkdir\nV" + place + b"\no."
    yield "stack global", b"\x80\x04\x8c\x02os\x8c\x05mkdir\x93X" + text + b"\x85R."
    yield "new object", b"\x80\x02cos\nmkdir\nX" + text + b"\x85\x81."
    yield "extension", b"\x80\x02\x82\x01)R."
    yield "persistent id", b"Pevil\n."
    yield "eval", b"c__builtin__\neval\n(V__import__('os').mkdir('" + place + b"')\ntR."
    yield "getattr", b"cbuiltins\ngetattr\n(cos\nsystem\nVx\ntR."
    yield "numpy's own loader", b"cnumpy\nload\n(V" + place + b"\ntR."
    yield "deep in numpy", b"cnumpy.core.multiarray\nos.mkdir\n(V" + place + b"\ntR."
    yield "dotted", b"\x80\x04\x8c\x05numpy\x8c\x0cos.mkdir....\x93X" + text + b"\x85R."


@pytest.mark.parametrize("name", [name for name, _ in hostile("x")])
def test_code_is_refused_and_never_runs(tmp_path, name):
    canary = tmp_path / "canary"
    content = dict(hostile(canary))[name]
    with pytest.raises(DataError, match=r"set\.pkl: refused, it contains (code|an array of 'O8')"):
        read_pickle(stored(tmp_path, content))
    assert not canary.exists()


def test_the_canary_would_sing_in_the_ordinary_unpickler(tmp_path):
    canary = tmp_path / "canary"
    pickle.loads(pickle.dumps(Runs(canary)))
    assert canary.exists()


PLAIN_TYPE = (3, "|", None, None, None, -1, -1, 0)


def array_pickle(*, shape=(2,), spec="u1", data=b"ab", state=None, type_state=PLAIN_TYPE):
    """An array as NumPy pickles it, with parts of it forged."""
    state = (1, shape, "TYPE", False, data) if state is None else state

    class Forged(pickle._Pickler):
        def save(self, value, **options):
            if value == "TYPE" and isinstance(value, str):
                self.write(b"cnumpy\ndtype\n(V" + spec.encode() + b"\nI00\nI01\ntR")
                super().save(type_state)
                self.write(b"b")
            else:
                super().save(value, **options)

    stream = io.BytesIO()
    pickler = Forged(stream, 2)
    stream.write(b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntVb\ntR")
    pickler.save(state)
    stream.write(b"b.")
    return stream.getvalue()


def test_the_forge_makes_good_arrays(tmp_path):
    got = read_pickle(stored(tmp_path, array_pickle()))
    assert same(got, np.frombuffer(b"ab", np.uint8))


@pytest.mark.parametrize(
    ("forged", "message"),
    [
        ({"shape": (10**15,)}, "shape does not fit its bytes"),
        ({"shape": (-2,)}, "not of plain numbers"),
        ({"shape": [2]}, "not of plain numbers"),
        ({"spec": "O8"}, "an array of 'O8'"),
        ({"spec": "V8"}, "an array of 'V8'"),
        ({"spec": "u1,O8"}, "an array of 'u1,O8'"),
        ({"type_state": (3, "|", None, ("a",), {"a": 1}, -1, -1, 0)}, "an array of records"),
        ({"type_state": (3, "x", None, None, None, -1, -1, 0)}, "type of array that is not simple"),
        ({"type_state": 3}, "type of array that is not simple"),
        ({"data": [1, 2]}, "not of plain numbers"),
        ({"state": (1, 2)}, "an unknown form"),
        ({"state": {"a": 1}}, "an unknown form"),
    ],
)
def test_forged_arrays_are_refused(tmp_path, forged, message):
    with pytest.raises(DataError, match=message):
        read_pickle(stored(tmp_path, array_pickle(**forged)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"cnumpy\ndtype\n.", "functions or types as data"),
        (b"cnumpy\nndarray\n)R.", "an array without content"),
        (b"cnumpy\nndarray\n(dVx\nI1\nsb.", "tries to change a function"),
        (b"cnumpy\nndarray\n(N(dV__call__\nI1\nstb.", "tries to change a function"),
        (b"c_codecs\nencode\n(Vx\nVrot13\ntR.", "bytes in an unknown form"),
        (b"(lp0\ng0\na.", "contains itself"),
        (b"]" * 40 + b"a" * 39 + b".", "nested too deep"),
        (b"(lq\x00}q\x01(h\x01K\x01u.", "a dict with a key that is a dict"),
        (b"]K\x00K\x01s.", "sets an item of something that is no dict"),
        (b"(lr\xff\xff\xff\x7f.", "numbers a note 2147483647"),
    ],
)
def test_tricks_are_refused(tmp_path, content, message):
    with pytest.raises(DataError, match=message):
        read_pickle(stored(tmp_path, content))


def test_a_structure_may_share_parts(tmp_path):
    data = [1]
    for _ in range(10):
        data = [data, data]
    got = read_pickle(stored(tmp_path, pickle.dumps(data)))
    for _ in range(10):
        assert got[0] is got[1]
        got = got[0]


def folded(times, part):
    """Name one part twice, that again twice, and so on: a few bytes for 2 ** times parts."""
    for _ in range(times):
        part = (part, part)
    return part


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"data": 1, "labels": folded(25, "x")}, "unfolds to"),
        ({"data": 1, "labels": list(folded(25, 1))}, "unfolds to"),
        ({"labels": ["x" * 100_000] * 1000}, "unfolds to"),
        ({"labels": [np.zeros(100_000, np.uint8)] * 10_000}, "unfolds to"),
        ({folded(25, "x"): 1}, "a dict with a key that is a tuple"),
        ([{folded(25, "x"): 1, folded(24, "x"): 2}], "a dict with a key that is a tuple"),
        ({"labels": 1 << 5000}, "a number of 5001 bits"),
    ],
)
@pytest.mark.parametrize("protocol", [0, 2, 5])
@pytest.mark.timeout(20)
def test_a_small_file_does_not_unfold_to_a_huge_structure(tmp_path, content, message, protocol):
    path = stored(tmp_path, pickle.dumps(content, protocol))
    with pytest.raises(DataError, match=message):
        read_pickle(path)


@pytest.mark.timeout(60)
def test_a_text_is_not_copied_for_every_use(tmp_path):
    size = (1 << 20).to_bytes(4, "little")
    begin = (
        b"\x80\x02]q\x00c_codecs\nencode\nq\x01X"
        + size
        + b"x" * (1 << 20)
        + b"q\x02U\x06latin1q\x03000"
    )
    use = b"h\x01h\x02h\x03\x86Ra"
    with pytest.raises(DataError, match="unfolds to"):
        read_pickle(stored(tmp_path, begin + 20_000 * use + b"."))


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x00N.",
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\x00\x00\x00N.",
        b"\x80\x05\x96\xff\xff\xff\xff\xff\x00\x00\x00N.",
        b"B\xff\xff\xff\x7fN.",
    ],
    ids=["frame", "bytes", "bytearray", "short bytes"],
)
def test_no_room_is_made_for_bytes_that_the_file_does_not_have(tmp_path, content):
    path = stored(tmp_path, content)
    tracemalloc.start()
    try:
        with contextlib.suppress(DataError):  # a frame that is too long may still hold data
            assert read_pickle(path) is None
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_refusal_leaves_nothing_changed_behind(tmp_path):
    with pytest.raises(DataError):
        read_pickle(stored(tmp_path, b"cnumpy\nndarray\n(dV__call__\nI1\nsb."))
    assert same(read_pickle(stored(tmp_path, pickle.dumps(DATA, 5))), DATA)


@given(st.binary(max_size=40), st.integers(0, 2000), st.integers(1, 255))
@settings(max_examples=150, deadline=None)
def test_damaged_files_give_data_or_a_named_error_and_nothing_else(
    tmp_path_factory, junk, at, flip
):
    good = bytearray(pickle.dumps(DATA, 5))
    good[at % len(good)] ^= flip
    path = tmp_path_factory.getbasetemp() / "fuzz.pkl"
    for content in (bytes(good), junk + b".", bytes(good[: at % len(good)])):
        path.write_bytes(content)
        try:
            read_pickle(path)
        except DataError as error:
            message = error.message
        else:
            message = "fuzz.pkl: came through"
        assert "fuzz.pkl: " in message


def test_every_instruction_that_is_let_through_is_one_that_python_knows():
    from torchemo.data.formats.pickles import _OPCODES

    known = {opcode.name for opcode in pickletools.opcodes}
    assert known >= _OPCODES
    assert not _OPCODES & {"INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "PERSID", "BINPERSID"}
    assert not _OPCODES & {"EXT1", "EXT2", "EXT4"}
