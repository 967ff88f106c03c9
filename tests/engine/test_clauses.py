"""Which tests on a live server show each clause of docs/semantics.md and of the contract that
the page interprets, so that a clause without a test stands out.
"""

from __future__ import annotations

import importlib

import pytest

IDENTITY_AND_ADMISSION = {
    "request_id takes 1 to 256 printable characters": (
        "test_rejections.test_request_is_rejected",
        "test_rejections.test_request_id_is_accepted",
    ),
    "a live duplicate is refused and the first goes on": (
        "test_rejections.test_live_duplicate_is_rejected_and_the_first_goes_on",
    ),
    "an id is free once its request has ended, also right after an abort": (
        "test_generate.test_id_is_free_again_when_its_request_has_ended",
        "test_cancellation.test_abort_and_use_the_id_again_at_once",
        "test_cancellation.test_id_is_free_after_a_cancel",
    ),
    "unknown fields inside kv are rejected": ("test_rejections.test_request_is_rejected",),
    "model is a served name, an alias, or empty": (
        "test_generate.test_model_may_be_empty_its_name_or_an_alias",
        "test_rejections.test_request_is_rejected",
    ),
    "admission counts sequences, and answers at once beyond the limit": (
        "test_rejections.test_sequences_over_the_capacity_are_refused_at_once",
        "test_rejections.test_a_request_counts_with_all_its_sequences",
        "test_rejections.test_vllms_own_queue_limit_is_overload",
    ),
    "numbers are checked before the engine sees them": (
        "test_rejections.test_request_is_rejected",
        "test_rejections.test_request_at_the_limit_is_accepted",
        "test_rejections.test_extreme_value_is_accepted_and_harms_nobody",
    ),
    "absent options are the model's own defaults": (
        "test_generate.test_absent_temperature_is_the_models_own",
        "test_generate.test_absent_max_tokens_is_the_models_own",
        "test_generate.test_absent_max_tokens_without_a_default_is_the_rest_of_the_context",
        "test_generate.test_absent_temperature_without_a_default_is_one",
    ),
    "hints of a call's metadata count, and may not contradict the body": (
        "test_metadata.test_what_is_accepted",
        "test_metadata.test_what_contradicts_the_body",
    ),
}

GENERATE_STREAM = {
    "prompt, then tokens, one finish an output, usage on the last": (
        "test_token_information.test_prompt_event_comes_first_and_once",
        "test_generate.test_each_output_finishes_once_and_the_last_has_usage",
        "test_generate.test_tokens_come_as_they_are_made",
    ),
    "a character that spans tokens comes whole, with the last": (
        "test_generate.test_character_of_several_tokens_comes_whole_with_the_last",
    ),
    "text and tokens are vLLM's, without the prompt's": (
        "test_equality.test_greedy_equals_vllm",
        "test_equality.test_request_equals_vllm",
        "test_random_requests.test_random_request_equals_vllm_and_transformers",
        "test_generate.test_prompt_text_is_never_part_of_the_output",
    ),
    "each token has the text that it adds, a special one its own string": (
        "test_generate.test_pieces_concatenate_to_the_text",
        "test_generate.test_text_of_a_delta_is_that_of_its_tokens",
        "test_generate.test_special_token_carries_its_own_string_and_no_text",
    ),
    "a matched stop is left out, unless it is included": (
        "test_generate.test_stop_token_is_in_neither_tokens_nor_text",
        "test_generate.test_included_stop_token_is_in_both",
        "test_generate.test_token_that_carries_text_before_the_stop_is_emitted_with_that",
        "test_generate.test_token_that_begins_inside_the_stop_is_not_emitted",
        "test_generate.test_included_stop_text_ends_the_text",
        "test_generate.test_usage_counts_the_stop_in_both_settings",
    ),
    "held-back text that is no stop is flushed before the finish": (
        "test_generate.test_held_back_text_is_flushed_before_the_end",
        "test_token_information.test_scores_stay_with_their_tokens_through_held_back_stops",
    ),
    "a caller's stop id wins over EOS; an EOS is emitted without text": (
        "test_generate.test_callers_stop_id_wins_over_the_models_eos",
        "test_generate.test_every_eos_id_of_the_model_is_an_eos_match",
        "test_generate.test_ignored_eos_does_not_end_the_output",
    ),
    "min_tokens holds off stops": ("test_generate.test_min_tokens_holds_off_stops",),
    "each token's own score, and exactly the candidates asked for": (
        "test_token_information.test_no_scores_unless_asked_for",
        "test_token_information.test_candidates_without_the_flag_imply_the_tokens_own_score",
        "test_token_information.test_top_n_is_n_distinct_ids_also_when_the_token_is_not_among_them",
        "test_token_information.test_whole_vocabulary_is_a_distribution",
        "test_token_information.test_kinds_of_candidates_do_not_spoil_each_other",
    ),
    "masked candidates are left out": (
        "test_token_information.test_candidates_that_a_grammar_masks_are_left_out",
    ),
    "one prompt record a position from the start on, none scored at 0": (
        "test_token_information.test_first_position_has_no_scores",
        "test_token_information.test_prompt_scores_begin_where_asked",
    ),
    "prompt scores do not depend on the cache": (
        "test_token_information.test_prompt_scores_are_equal_for_a_cached_prompt",
    ),
    "an answer that can't fit is refused beforehand": (
        "test_token_information.test_twenty_candidates_on_a_long_prompt_arrive",
        "test_token_information.test_answer_that_cannot_fit_is_refused_beforehand",
    ),
    "usage: prompt once, completion over all outputs, cache hits": (
        "test_generate.test_prompt_tokens_count_once_and_completion_over_all_outputs",
        "test_generate.test_cached_prompt_tokens_are_present_when_none_and_when_some",
        "test_generate.test_outputs_of_one_request_are_no_cache_hits_of_each_other",
        "test_generate.test_cached_prompt_tokens_are_absent_without_prefix_caching",
    ),
    "all seeds are deterministic": (
        "test_generate.test_seed_is_deterministic",
        "test_equality.test_outputs_of_the_largest_seed_go_on_from_it",
    ),
    "larger priority is sooner, and refused without its scheduler": (
        "test_token_information.test_late_request_of_high_priority_overtakes",
        "test_rejections.test_request_is_rejected",
    ),
    "cancel, deadline and broken connections stop the request alone": (
        "test_cancellation.test_storm",
        "test_cancellation.test_deadline_ends_the_request_when_the_client_cannot_say_so",
        "test_cancellation.test_cancel_while_queued",
    ),
    "abort finishes each output as cancelled": (
        "test_generate.test_abort_finishes_each_output_as_cancelled",
        "test_cancellation.test_abort_while_queued",
        "test_cancellation.test_abort_of_outputs_one_of_which_has_finished",
        "test_token_information.test_request_that_waits_for_another_kind_can_be_aborted",
    ),
    "a drain's abort fails with DRAINING": (
        "test_lifecycle.test_drain_deadline",
        "test_drain.test_requests_that_the_deadline_ends",
    ),
    "a dead engine fails streams, and the process ends": (
        "test_engine_death.test_killed_engine_ends_the_server",
        "test_engine_death.test_worker_out_of_memory_and_a_server_told_to_stay",
    ),
    "guides are followed, and malformed ones refused": (
        "test_guided.test_output_follows_its_guide",
        "test_guided.test_malformed_guide_is_refused_before_any_event",
    ),
}

DRAIN_LOAD_AND_EVENTS = {
    "a drain ends with the last request, or fails at its deadline": (
        "test_drain.test_requests_that_end_in_time",
        "test_drain.test_requests_that_outlast_the_deadline",
    ),
    "a drain that doesn't stop accepting leaves Health READY": (
        "test_drain.test_requests_that_end_in_time",
    ),
    "one that does is for good; two at once don't conflict; one goes on without its caller": (
        "test_drain.test_a_server_that_is_taken_out_of_service",
    ),
    "SIGTERM is a drain, a second signal stops now, and loading stops promptly": (
        "test_lifecycle.test_life_on_a_unix_socket",
        "test_lifecycle.test_ctrl_c_in_the_terminal_then_again",
        "test_lifecycle.test_signal_while_loading",
    ),
    "GetLoad tells what runs and what waits, and zeros when idle": (
        "test_load.test_an_idle_engine",
        "test_load.test_what_runs_and_what_waits",
        "test_load.test_the_cache_hit_rate",
    ),
    "runtime events tell of each pass, batch and queue": (
        "test_load.test_the_events_of_one_request",
    ),
}
ALL = IDENTITY_AND_ADMISSION | GENERATE_STREAM | DRAIN_LOAD_AND_EVENTS


@pytest.mark.parametrize("clause", ALL)
def test_clause_has_its_tests(clause: str) -> None:
    for name in ALL[clause]:
        module, _, function = name.partition(".")
        assert callable(getattr(importlib.import_module(f"tests.engine.{module}"), function))
