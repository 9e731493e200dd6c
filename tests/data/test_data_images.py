"""Image data sets: formats, splits, generated images, and what a user reads when one is wrong."""

from __future__ import annotations

import dataclasses
import gzip

import numpy as np
import pytest

from memtrain._config import parse
from memtrain._errors import ConfigError, DataError
from memtrain._registry import datasets
from memtrain.data import FILES, find, images
from memtrain.data._images import SPLITS, splits_of, statistics
from memtrain.data.images import (
    Digits,
    EfficientNetLite0Weights,
    FashionMnist,
    GeneratedImages,
    read_idx,
)

NAMES = ("fashion_mnist", "digits", "image_folder", "images_generated", "efficientnet_lite0")
here = pytest.mark.skipif(
    find(FILES["fashion_mnist"]) is None,
    reason="not on this machine; fetch it with: memtrain data fetch fashion_mnist",
)


def idx(array: np.ndarray) -> bytes:
    sizes = b"".join(n.to_bytes(4, "big") for n in array.shape)
    return gzip.compress(bytes([0, 0, 8, array.ndim]) + sizes + array.astype(np.uint8).tobytes())


def test_the_registry_names_every_data_set():
    for name in NAMES:
        dataset = datasets.get(name)
        assert dataset.name == name
        assert dataclasses.is_dataclass(dataset.Config)
        assert dataset.sources is FILES.get(name)


def test_idx_of_any_rank():
    for shape in ((7,), (3, 2, 4)):
        array = np.arange(np.prod(shape)).reshape(shape)
        assert np.array_equal(read_idx(idx(array), "x"), array)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no gzip",
        idx(np.zeros(9))[:-9],
        gzip.compress(b""),
        gzip.compress(b"\0\0\x0d\1\0\0\0\0"),
        gzip.compress(b"\0\0\x08\1\0\0\0\x05abc"),
        gzip.compress(b"\0\0\x08\3\0\0"),
    ],
    ids=["empty", "text", "cut gzip", "nothing", "floats", "too short", "half a header"],
)
def test_a_damaged_idx_file_is_named(content):
    with pytest.raises(DataError, match=r"train-images cannot be read: .+\."):
        read_idx(content, "train-images")


def test_fashion_mnist_keeps_the_published_test_split(monkeypatch):
    train = np.arange(40, dtype=np.uint8)  # an image's one value is its number
    contents = {
        "train-images-idx3-ubyte.gz": idx(train[:, None, None]),
        "train-labels-idx1-ubyte.gz": idx(train % 10),
        "t10k-images-idx3-ubyte.gz": idx(100 + train[:10, None, None]),
        "t10k-labels-idx1-ubyte.gz": idx(train[:10]),
    }
    monkeypatch.setattr(images, "locate", lambda sources, path, download: None)
    monkeypatch.setattr(images, "read_checked", lambda folder, file: contents[file.name])
    data = FashionMnist.load(FashionMnist.Config(val_images=12))
    kept, held = (data.images[split].ravel() for split in ("train", "val"))
    assert (len(kept), len(held), data.count("test")) == (28, 12, 10)
    assert sorted([*kept, *held]) == list(range(40))
    assert not np.array_equal(np.sort(held), held), "drawn, not the first ones"
    for split, pixels in (("train", kept), ("val", held)):
        assert np.array_equal(data.labels[split], pixels % 10)
        assert data.labels[split].dtype == np.int64
    assert np.array_equal(data.images["test"].ravel(), 100 + np.arange(10))
    again = FashionMnist.load(FashionMnist.Config(val_images=12), seed=5)
    assert np.array_equal(again.images["val"], data.images["val"]), "the run's seed plays no part"
    other = FashionMnist.load(FashionMnist.Config(val_images=12, split_seed=1))
    assert not np.array_equal(other.images["val"], data.images["val"])


@pytest.mark.data
@here
def test_fashion_mnist_is_the_published_one():
    data = FashionMnist.load(FashionMnist.Config(download=False))
    assert [data.count(split) for split in SPLITS] == [55_000, 5_000, 10_000]
    assert (data.channels, data.size) == (1, (28, 28))
    every = np.concatenate([data.labels["train"], data.labels["val"]])
    assert np.bincount(every).tolist() == [6000] * 10
    assert np.bincount(data.labels["test"]).tolist() == [1000] * 10
    mean, std = statistics(np.concatenate([data.images["train"], data.images["val"]]))
    assert mean == pytest.approx(data.mean, abs=5e-5)
    assert std == pytest.approx(data.std, abs=5e-5)


def test_digits():
    pytest.importorskip("sklearn")
    data = Digits.load(Digits.Config())
    assert [data.count(split) for split in SPLITS] == [1257, 180, 360]
    assert (data.channels, data.size, len(data.classes)) == (1, (8, 8), 10)
    assert data.images["train"].max() == 255


@pytest.mark.parametrize("channels", [1, 3])
def test_generated_stripes_have_the_direction_and_width_of_their_class(channels):
    """Read off the largest coefficient of the image's spectrum."""
    config = GeneratedImages.Config(
        size=64, channels=channels, classes=6, train_images=120, test_images=30, noise=0.5
    )
    data = GeneratedImages.load(config)
    found: dict[int, set[tuple[int, int]]] = {label: set() for label in range(6)}
    for image, label in zip(data.images["train"], data.labels["train"], strict=True):
        plane = image[0] - image[0].mean()
        spectrum = np.abs(np.fft.fft2(plane))
        row, column = np.unravel_index(spectrum[:, :32].argmax(), (64, 32))
        row = row if row <= 32 else row - 64
        found[int(label)].add((abs(int(row)), int(column)))
        if row < 0:
            found[int(label)].add((-1, -1))  # a mirror image
    for label, places in found.items():
        assert (-1, -1) in places, "mirrored ones are among them"
        angles = [np.arctan2(r, c) for r, c in places - {(-1, -1)}]
        widths = [np.hypot(r, c) for r, c in places - {(-1, -1)}]
        direction, thickness = divmod(label, 2)
        assert np.mean(angles) == pytest.approx(np.pi / 2 * (direction + 0.5) / 3, abs=0.25)
        assert np.mean(widths) == pytest.approx((2.0, 3.4)[thickness], abs=0.7)


def test_generated_images_depend_on_their_own_seed_only():
    config = GeneratedImages.Config(size=16, train_images=40, test_images=10)
    first, again = GeneratedImages.load(config), GeneratedImages.load(config, seed=3)
    other = GeneratedImages.load(dataclasses.replace(config, image_seed=1))
    for split in SPLITS:
        assert np.array_equal(first.images[split], again.images[split])
        assert not np.array_equal(first.images[split], other.images[split])
        assert first.images[split].dtype == np.uint8
    assert [first.count(split) for split in SPLITS] == [40, 10, 10]
    assert first.images["train"].shape == (40, 3, 16, 16)


def test_large_generated_images_are_drawn_in_blocks(monkeypatch):
    from memtrain.data import _images_generate

    drawn: list[int] = []
    real = _images_generate._stripes

    def counted(config, labels, rng):
        drawn.append(len(labels))
        return real(config, labels, rng)

    monkeypatch.setattr(_images_generate, "_stripes", counted)
    monkeypatch.setattr(_images_generate, "_BLOCK_PIXELS", 3 * 16 * 16 * 25)
    GeneratedImages.load(GeneratedImages.Config(size=16, train_images=40, test_images=10))
    assert drawn == [25, 25, 10]


def test_splits_are_a_partition():
    numbers = np.arange(30)
    parts, labels = splits_of(numbers[:, None], numbers, (5, 0), 0)
    assert list(parts) == ["train", "val"]
    assert sorted(np.concatenate(list(labels.values()))) == list(range(30))
    assert all(np.array_equal(parts[name].ravel(), labels[name]) for name in parts)
    with pytest.raises(DataError, match="20 for validation and 10 for testing leave none"):
        splits_of(numbers[:, None], numbers, (20, 10), 0)


def test_statistics_are_those_of_the_numbers():
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (10, 3, 5, 7), dtype=np.uint8)
    pixels[:, 2] = 51
    mean, std = statistics(pixels)
    assert mean == pytest.approx((pixels / 255).mean(axis=(0, 2, 3)))
    assert std[:2] == pytest.approx((pixels / 255).std(axis=(0, 2, 3))[:2])
    assert std[2] == 1.0, "a constant channel can be divided by its deviation"


def test_weights_say_where_they_belong():
    with pytest.raises(DataError, match=r"family\.pretrained=efficientnet_lite0"):
        EfficientNetLite0Weights.load(EfficientNetLite0Weights.Config())


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("fashion_mnist", {"val_image": 5}, "Did you mean 'val_images'"),
        ("fashion_mnist", {"val_images": 60_000}, "val_images 60000 is not between 1 and 59,999"),
        ("images_generated", {"size": 4}, "size 4 is below 8"),
        ("images_generated", {"classes": 1}, "classes 1 is not between 2 and 64"),
        ("images_generated", {"test_images": 0}, "test_images 0 is not a positive number"),
        ("images_generated", {"noise": -1}, "noise -1.0 is negative"),
        ("image_folder", {}, "path: required key is missing"),
        ("image_folder", {"path": "x", "val_fraction": 0.9}, "val_fraction 0.9 is not between"),
    ],
)
def test_config_errors(name, values, expected):
    with pytest.raises(ConfigError, match=expected):
        parse(datasets.get(name).Config, values, "data")
