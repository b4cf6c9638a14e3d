"""The parts of the stages by themselves."""

import numpy as np
from augmented.evaluation import measures
from augmented.experiment import EXPERIMENT
from augmented.prepare import digits, rotated
from augmented.settings import AugmentedSettings


def test_the_first_copy_is_the_image_and_the_others_are_turned():
    images, _ = digits(last=5)
    copies = rotated(images, 3, 20.0, seed=1).reshape(5, 3, 8, 8)
    np.testing.assert_allclose(copies[:, 0], images)
    assert not np.allclose(copies[:, 1], images)


def test_rotations_follow_from_the_seed():
    images, _ = digits(last=5)
    np.testing.assert_array_equal(rotated(images, 3, 20.0, 1), rotated(images, 3, 20.0, 1))
    assert not np.array_equal(rotated(images, 3, 20.0, 1), rotated(images, 3, 20.0, 2))


def test_recall_is_the_share_of_a_digit_that_is_recognized():
    shown = np.repeat(np.arange(10), 4)
    recognized = shown.copy()
    recognized[0] = 9
    rows = measures(shown, recognized)
    assert rows["0"] == {"digit": "0", "images": 4, "recall": 0.75}
    assert (rows["1"]["recall"], rows["all"]["recall"]) == (1.0, 39 / 40)


def test_the_stages_are_in_order():
    stages = EXPERIMENT.stages(AugmentedSettings())
    assert [(stage.name, stage.needs) for stage in stages] == [
        ("prepare", ()),
        ("train", ("prepare",)),
        ("evaluate", ("train",)),
    ]
