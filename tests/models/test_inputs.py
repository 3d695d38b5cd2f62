import pytest
import torch

from torchemo.core.errors import ConfigError, DataError, ShapeError
from torchemo.models.inputs import check_choice, check_examples, check_params, check_positive


def test_floating_examples_with_a_task_axis_are_accepted():
    check_examples(torch.zeros(2, 3, 1, 8, 8), (1, 8, 8), what="net")


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((3, 1, 8, 8), "task axis"),
        ((2, 3, 1, 1, 8, 8), "task axis"),
        ((2, 3, 3, 8, 8), "channels"),
        ((2, 3, 1, 9, 8), "Resize"),
        ((2, 0, 1, 8, 8), "at least one task and one example"),
        ((0, 3, 1, 8, 8), "at least one task and one example"),
    ],
)
def test_examples_of_another_shape_are_refused_with_expected_and_got(shape, words):
    with pytest.raises(ShapeError, match=words) as error:
        check_examples(torch.zeros(shape), (1, 8, 8), what="net")
    assert str(list(shape)) in error.value.message


def test_integer_pictures_are_refused_with_the_way_to_scale_them():
    with pytest.raises(DataError, match="255"):
        check_examples(torch.zeros(1, 1, 1, 8, 8, dtype=torch.uint8), (1, 8, 8), what="net")


def test_a_missing_parameter_is_named():
    with pytest.raises(ShapeError, match="'w' is missing"):
        check_params({"v": torch.zeros(2, 3)}, {"w": (3,)}, tasks=2, what="net")


def test_parameters_without_task_axis_are_refused_with_the_way_to_add_it():
    with pytest.raises(ShapeError, match="expand"):
        check_params({"w": torch.zeros(3)}, {"w": (3,)}, tasks=2, what="net")


def test_parameters_of_another_number_of_tasks_are_refused():
    with pytest.raises(ShapeError, match=r"'w' should have shape \[2, 3\].*got \[4, 3\]"):
        check_params({"w": torch.zeros(4, 3)}, {"w": (3,)}, tasks=2, what="net")


def test_tensors_that_nobody_expects_are_left_alone():
    check_params({"w": torch.zeros(2, 3), "rate": torch.zeros(1)}, {"w": (3,)}, tasks=2, what="n")


def test_an_unknown_choice_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="'bn' should be one of a, b, got 'c'"):
        check_choice("bn", "c", ("a", "b"))


def test_a_size_below_one_is_refused_by_name():
    with pytest.raises(ConfigError, match="'filters' should be at least 1, got 0"):
        check_positive(n_way=5, filters=0)
