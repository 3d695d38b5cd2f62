"""The laws once more, on the compiled convolution block: all that need no smooth network.

No test is written here. What is imported runs with another problem: every learner with plain memories, and
MAML with all memories and rules (tests/conftest.py). Others meet on the smooth network. The unit tier takes
plain descent and cheap aggregators.
"""

import pytest

from tests.core.test_workers import (  # noqa: F401
    test_results_are_bitwise_the_same_for_any_number_of_workers,
)
from tests.laws import cases
from tests.laws.test_invariances import (  # noqa: F401
    test_a_saved_and_restored_memory_continues_bit_for_bit,
    test_an_untrained_gate_is_the_base_learner_bit_for_bit,
    test_evaluation_leaves_the_memory_as_it_was,
    test_no_memory_is_the_base_learner_bit_for_bit,
    test_permuting_the_slots_changes_nothing,
    test_relabelling_a_task_with_its_head_rows_changes_no_loss,
    test_tasks_in_one_call_equal_a_loop_over_tasks,
    test_the_order_of_tasks_and_their_company_change_nothing,
)
from torchemo.models import fused


@pytest.fixture(autouse=True)
def on_the_compiled_block(monkeypatch):
    if not fused.status(bits=64).available:
        pytest.skip("no C compiler")
    monkeypatch.setattr(cases, "problem", cases.FUSED)
