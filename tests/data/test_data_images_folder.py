"""Folders of images by class, read with Pillow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from memtrain._errors import DataError, MissingExtraError
from memtrain.data.images import ImageFolder

Image = pytest.importorskip("PIL.Image")


def save(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.astype(np.uint8)).save(path)


def fill(root: Path, counts: dict[str, int], start: int = 0) -> None:
    for shade, (name, count) in enumerate(counts.items()):
        for i in range(count):
            save(root / name / f"{i}.png", np.full((8, 8, 3), 50 * shade + start + i))


def test_classes_are_folders_in_order_and_the_split_is_drawn(tmp_path):
    fill(tmp_path, {"b_dogs": 10, "a_cats": 20})
    (tmp_path / "a_cats" / "notes.txt").write_text("no image")
    (tmp_path / ".hidden").mkdir()
    config = ImageFolder.Config(path=str(tmp_path), size=8)
    data = ImageFolder.load(config)
    assert data.classes == ("a_cats", "b_dogs")
    assert {split: data.count(split) for split in data.labels} == {"train": 24, "val": 3, "test": 3}
    every = [
        (int(label), int(image[0, 0, 0]))
        for split in data.labels
        for image, label in zip(data.images[split], data.labels[split], strict=True)
    ]
    assert sorted(every) == [(0, 50 + i) for i in range(20)] + [(1, i) for i in range(10)]
    assert "random val and test" in data.split


def test_a_divided_folder_keeps_its_division(tmp_path):
    fill(tmp_path / "train", {"cats": 10, "dogs": 10})
    fill(tmp_path / "test", {"cats": 0, "dogs": 4}, start=200)
    data = ImageFolder.load(ImageFolder.Config(path=str(tmp_path), size=8))
    assert {split: data.count(split) for split in data.labels} == {"train": 18, "val": 2, "test": 4}
    assert (data.images["test"] >= 200).all()
    assert (data.labels["test"] == 1).all()
    assert data.split == "folders train and test; random val, seed 0"


def test_the_middle_square_is_taken(tmp_path):
    wide = np.zeros((6, 18, 3))
    wide[:, 6:12] = 200
    tall = wide.transpose(1, 0, 2)
    for i in range(5):
        save(tmp_path / "wide" / f"{i}.png", wide)
        save(tmp_path / "tall" / f"{i}.bmp", tall)
    data = ImageFolder.load(ImageFolder.Config(path=str(tmp_path), size=6))
    assert data.size == (6, 6)
    assert all((pixels == 200).all() for pixels in data.images.values())
    smaller = ImageFolder.load(ImageFolder.Config(path=str(tmp_path), size=3))
    assert all((pixels[..., 1, 1] == 200).all() for pixels in smaller.images.values())


def test_the_camera_s_orientation_counts(tmp_path):
    pixels = np.zeros((8, 8, 3), np.uint8)
    pixels[0, 0] = 255  # the camera was turned by half a circle: this corner is the last one
    for name in ("a", "b"):
        for i in range(4):
            (tmp_path / name).mkdir(exist_ok=True)
            exif = Image.Exif()
            exif[0x0112] = 3
            Image.fromarray(pixels).save(tmp_path / name / f"{i}.png", exif=exif)
    data = ImageFolder.load(ImageFolder.Config(path=str(tmp_path), size=8))
    for images in data.images.values():
        assert (images[:, :, 7, 7] == 255).all()
        assert (images[:, :, 0, 0] == 0).all()


def test_grey_images_become_three_channels(tmp_path):
    for name in ("a", "b"):
        for i in range(4):
            save(tmp_path / name / f"{i}.png", np.full((4, 4), 77))
    data = ImageFolder.load(ImageFolder.Config(path=str(tmp_path), size=4))
    assert data.channels == 3
    assert (data.images["train"] == 77).all()


def test_what_is_wrong_is_named(tmp_path):
    def load(path: Path):
        return ImageFolder.load(ImageFolder.Config(path=str(path), size=4))

    with pytest.raises(DataError, match="nowhere cannot be read: No such file"):
        load(tmp_path / "nowhere")
    (tmp_path / "one" / "cats").mkdir(parents=True)
    with pytest.raises(DataError, match=r"two or more folders in .*one.* found 1"):
        load(tmp_path / "one")
    (tmp_path / "one" / "dogs").mkdir()
    with pytest.raises(DataError, match="has no images"):
        load(tmp_path / "one")
    fill(tmp_path / "bad", {"cats": 3, "dogs": 3})
    (tmp_path / "bad" / "dogs" / "1.png").write_bytes(b"not a picture")
    with pytest.raises(DataError, match=r"1\.png cannot be read as an image"):
        load(tmp_path / "bad")
    fill(tmp_path / "more" / "train", {"cats": 3, "dogs": 3})
    fill(tmp_path / "more" / "val", {"cats": 3, "birds": 3})
    with pytest.raises(DataError, match="the class 'birds' has no images to train on"):
        load(tmp_path / "more")


def test_without_pillow_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'memtrain\[cnn\]'"):
        ImageFolder.load(ImageFolder.Config(path=str(tmp_path)))
