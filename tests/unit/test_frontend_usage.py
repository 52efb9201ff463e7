"""What an answer of several choices is billed."""

from kvmesh.types import Completion, FinishReason, TextPrompt, Usage
from services.frontend.request import Request
from services.frontend.usage import total_usage


def asked(prompts: int, n: int) -> Request:
    return Request("m", tuple(TextPrompt(f"p{i}") for i in range(prompts)), 1.0, n=n)


def ended(prompt: int, completion: int, cached: int = 0) -> Completion:
    return Completion(FinishReason.STOP, Usage(prompt, completion, cached))


def test_one_choice_is_billed_as_it_is() -> None:
    assert total_usage(asked(1, 1), {0: ended(7, 3, 5)}) == Usage(7, 3, 5)


def test_a55_a_prompt_counts_once_and_every_choice_its_own_tokens() -> None:
    completions = {0: ended(7, 3), 1: ended(7, 1), 2: ended(7, 2)}
    assert total_usage(asked(1, 3), completions) == Usage(7, 6, 0)


def test_a55_prompts_of_a_batch_add_up() -> None:
    completions = {0: ended(7, 3), 1: ended(7, 1), 2: ended(4, 2), 3: ended(4, 5)}
    assert total_usage(asked(2, 2), completions) == Usage(11, 11, 0)


def test_what_one_choice_computed_is_no_discount_for_the_others() -> None:
    completions = {0: ended(20, 1, 4), 1: ended(20, 1, 16), 2: ended(20, 1, 16)}
    assert total_usage(asked(1, 3), completions).cached_tokens == 4


def test_choices_without_an_end_count_nothing() -> None:
    assert total_usage(asked(1, 2), {1: ended(7, 2)}) == Usage(7, 2, 0)
    assert total_usage(asked(1, 2), {}) == Usage(0, 0, 0)
