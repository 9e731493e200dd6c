"""Every saved-tensor compressor of the registry holds to the contract."""

import torch

from memtrain._registry import compressors
from memtrain.compressors import PackContext, SavedCompressor, SlotKey
from memtrain.testing import SavedCompressorContract


class TestNone(SavedCompressorContract):
    name = "none"


class TestBlockwise(SavedCompressorContract):
    name = "blockwise"


class TestBlockwiseTwoBits(SavedCompressorContract):
    name = "blockwise"
    options = {"bits": 2, "group": 64}  # noqa: RUF012


class TestBlockwiseRotated(SavedCompressorContract):
    name = "blockwise"
    options = {"rotate": True}  # noqa: RUF012


class TestGact(SavedCompressorContract):
    name = "gact"


class TestOffload(SavedCompressorContract):
    name = "offload"

    def test_fake_trace_matches_the_real_one(self):
        """A traced step has no bytes to write."""


class TestPlanned(SavedCompressorContract):
    name = "planned"


class TestBitmaskRelu(SavedCompressorContract):
    name = "bitmask"
    function = "relu"
    slot = "out0"


class TestBitmaskBool(SavedCompressorContract):
    name = "bitmask"
    function = "where"
    dtypes = (torch.bool,)


class TestBitmaskDropout(SavedCompressorContract):
    name = "bitmask"
    function = "dropout"
    slot = "out0"
    sizes_vary = True

    def make(self):
        made = super().make()
        bits = made.nbytes
        # The two values come on top of the bits.
        made.nbytes = lambda shape, dtype: bits(shape, dtype) + 2 * dtype.itemsize
        return made

    def values(self, shape, dtype, seed=0):
        return (super().values(shape, torch.bool, seed) * 2.0).to(dtype)


class TestShapeOnly(SavedCompressorContract):
    name = "shape_only"
    function = "avg_pool2d"

    def _laid_out(self, layout, dtype):
        return super()._laid_out(layout, dtype).contiguous()

    def test_gradient_error_of_a_small_network(self):
        """The network of the suite has no pooling; see test_slots.py."""


class TestWindowIndex(SavedCompressorContract):
    name = "window_index"
    function = "max_pool1d"
    slot = "out0"
    arguments = (2,)
    dtypes = (torch.int64,)
    sizes_vary = True  # by the size of the window

    def context(self, x, seed=1):
        key = SlotKey("layer", self.function, 0, self.slot)
        return PackContext(key, seed, {}, (x.repeat_interleave(2, dim=-1), *self.arguments))

    def values(self, shape, dtype, seed=0):
        shape = shape or (1,)  # a plane has at least one position
        return super().values(shape, dtype, seed) + 2 * torch.arange(shape[-1])

    def test_gradient_error_of_a_small_network(self):
        """The network of the suite has no pooling; see test_window_index.py."""


class TestNarrowInt(SavedCompressorContract):
    name = "narrow_int"
    function = "index_select"
    slot = "in1"
    dtypes = (torch.int64, torch.int32)
    sizes_vary = True

    def values(self, shape, dtype, seed=0):
        return super().values(shape, dtype, seed) * 1000

    def test_fake_trace_matches_the_real_one(self):
        """The type follows from the values, which a traced step lacks; see test_narrow_int.py."""


def test_every_entry_is_covered():
    covered = {c.name for c in SavedCompressorContract.__subclasses__()}
    saved = {
        entry.name
        for entry in compressors.entries()
        if not entry.source.endswith("(in process)")  # another test's own
        and issubclass(compressors.get(entry.name), SavedCompressor)
    }
    assert saved <= covered
