"""Shifts and mirror images: by hand, as draws, and inside the family's batches."""

from __future__ import annotations

import numpy as np
import torch

from memtrain.data.images import GeneratedImages
from memtrain.families.cnn import Cnn, CnnConfig
from memtrain.families.cnn._augment import Draws, augmented, draw

DATA = GeneratedImages.load(
    GeneratedImages.Config(size=16, channels=2, train_images=70, test_images=10)
)


def draws(down: int, right: int, mirrored: bool) -> Draws:
    return Draws(np.array([down]), np.array([right]), np.array([mirrored]))


def test_a_shift_and_a_mirror_image_by_hand():
    image = np.arange(1, 10, dtype=np.uint8).reshape(1, 1, 3, 3)
    cases = {
        (0, 0, False): [[1, 2, 3], [4, 5, 6], [7, 8, 9]],
        (0, 0, True): [[3, 2, 1], [6, 5, 4], [9, 8, 7]],
        (1, 0, False): [[4, 5, 6], [7, 8, 9], [0, 0, 0]],
        (-2, 0, False): [[0, 0, 0], [0, 0, 0], [1, 2, 3]],
        (0, 1, False): [[2, 3, 0], [5, 6, 0], [8, 9, 0]],
        (-1, -1, False): [[0, 0, 0], [0, 1, 2], [0, 4, 5]],
        (0, 1, True): [[0, 3, 2], [0, 6, 5], [0, 9, 8]],
    }
    for case, expected in cases.items():
        assert augmented(image, draws(*case))[0, 0].tolist() == expected, case


def test_each_image_of_a_batch_gets_its_own():
    images = DATA.images["train"][:20]
    chosen = draw(0, 1, np.arange(20), 2)
    together = augmented(images, chosen)
    for i in range(20):
        part = Draws(chosen.down[i : i + 1], chosen.right[i : i + 1], chosen.mirrored[i : i + 1])
        assert np.array_equal(together[i], augmented(images[i : i + 1], part)[0])
    assert together.shape == images.shape
    assert torch.from_numpy(together).is_contiguous(memory_format=torch.channels_last)


def test_draws_are_a_function_of_seed_epoch_and_image():
    index = np.arange(1000)
    first = draw(3, 5, index, 4)
    order = np.random.default_rng(0).permutation(1000)
    again = draw(3, 5, order, 4)  # in other batches, in another order
    assert np.array_equal(first.down[order], again.down)
    assert np.array_equal(first.mirrored[order], again.mirrored)
    for seed, epoch in ((4, 5), (3, 6), (5, 3)):
        other = draw(seed, epoch, index, 4)
        assert (other.down == first.down).mean() < 0.2, "one in nine by chance"


def test_draws_are_uniform_and_independent():
    chosen = draw(0, 0, np.arange(90_000), 4)
    for shift in (chosen.down, chosen.right):
        counts = np.bincount(shift + 4, minlength=9)
        assert len(counts) == 9
        assert np.abs(counts - 10_000).max() < 500  # five deviations
    assert abs(chosen.mirrored.mean() - 0.5) < 0.01
    values = np.stack([chosen.down, chosen.right, chosen.mirrored])
    assert np.abs(np.corrcoef(values) - np.eye(3)).max() < 0.02
    following = np.corrcoef(chosen.down[1:], chosen.down[:-1])[0, 1]
    assert abs(following) < 0.02


def test_training_batches_are_augmented_and_no_others():
    options = {"batch_size": 10}
    plain = Cnn(CnnConfig(**options), DATA, seed=2)
    shifted = Cnn(CnnConfig(augmentation="crop_flip", **options), DATA, seed=2)
    order = np.random.default_rng([2, 4]).permutation(70)
    for step, (a, b) in enumerate(
        zip(plain.batches("train", 4), shifted.batches("train", 4), strict=True)
    ):
        assert torch.equal(a.y, b.y)
        index = order[10 * step : 10 * step + 10]
        pixels = augmented(DATA.images["train"][index], draw(2, 4, index, 2))  # 16 / 8
        mean, std = (np.array(v).reshape(-1, 1, 1) for v in (DATA.mean, DATA.std))
        np.testing.assert_allclose(b.x.numpy(), (pixels / 255 - mean) / std, atol=1e-5)
        assert not torch.equal(a.x, b.x)
    for split in ("val", "test"):
        for a, b in zip(plain.batches(split, 1), shifted.batches(split, 2), strict=True):
            assert torch.equal(a.x, b.x)


def test_an_image_is_augmented_alike_whatever_the_batch_size():
    seen = []
    for size in (7, 35):
        family = Cnn(CnnConfig(augmentation="crop_flip", batch_size=size), DATA)
        seen.append(torch.cat([batch.x for batch in family.batches("train", 1)]))
    assert torch.equal(*seen)
