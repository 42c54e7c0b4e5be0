"""Real processes over gloo: what the simulators cannot see (hangs, order, other ranks' errors) and what a user does.

Each test starts processes once for many checks; a failure names the check and shows what its process wrote.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.processes.launch import ROOT, run_checks

COMPILED_S = 500  # inductor takes its time, and each rank compiles: 228 s where both have one core

# Of each file the checks that `make test` runs; `make test-all` runs all of them.
COUNTING = [
    "that_all_ranks_count",
    "buffers_that_parts_set",
    "states_that_are_carried",
    "a_teacher_and_a_queue",
    "membranes",
]
FIRST = {
    "api": ["accumulation", "dropout", "inputs_and_outputs", "state_dicts"],
    "asked": ["rows_of_each_rank_are_asked_together", "stages_ask_too"],
    "beside": ["losses_beside_the_module", "outputs_that_are_no_rows"],
    "boundary": [
        "anomalies_are_found_on_all_ranks",
        "every_output_has_its_gradient",
        "losses_of_rows_that_a_mask_picks",
        "one_seed_gives_the_numbers_of_one_process",
        "other_batches_on_each_rank_are_refused",
        "parts_of_each_rank_are_the_whole_batch",
        "seeds_of_ranks_do_not_matter",
        "other_sizes_and_evaluation",
    ],
    "branching": ["an_expert_is_idle_that_no_rank_has_tokens_for"],
    "changed": [
        "an_optimizer_of_what_was_replaced_is_refused",
        "parts_change_where_parameters_are_plain",
        "weights_that_change_stages_are_refused",
    ],
    "complexes": ["training"],
    "copies": ["a_copy_trains_by_itself"],
    "drawn": ["stages_have_it"],
    "errors": [
        "a_rank_that_is_told_something_else",
        "a_rank_that_differs",
        "a_model_that_cannot_be_captured",
        "too_little_memory",
    ],
    "faults": [
        "too_little_memory_for_the_pieces_of_one_rank",
        "rank_zero_may_plan_for_longer_than_the_group_waits",
    ],
    "edits": [
        "hooks_that_mask_gradients",
        "hooks_of_stages_that_mask_gradients",
        "parts_that_are_written_to",
        "parts_of_stages_that_are_written_to",
        "outputs_are_changed_in_place",
        "a_piece_that_backward_reads_must_not_be",
        "gradients_made_by_hand",
    ],
    "parts": [
        "parts_are_called_by_themselves",
        "parameters_beside_plain_tensors",
        "operators_without_a_rule",
        "parts_of_own_rows",
        "parts_of_stages",
    ],
    "counting": COUNTING,
    "hooked": ["what_hooks_keep"],
    "losses": [
        "losses_of_what_is_split",
        "reductions_over_an_empty_list_of_dims",
        "a_penalty_that_is_added_in_place",
        "numbers_that_forward_takes_out",
    ],
    "habits": ["a_script_with_a_seed_for_each_rank"],
    "memory": ["lookups"],
    "micro_batches": ["policies", "parts_of_each_rank"],
    "norms": ["local_ones_are_those_of_ddp"],
    "later_steps": ["stages_that_are_traced_again_keep_their_plans", "later_steps_hold_no_more_than_they_may"],
    "operators": ["gradient_scaling"],
    "optimizers": [
        "clipping_of_a_module_and_what_is_plain_around_it",
        "collectives_of_a_script_say_what_to_do",
        "one_number_of_all_parameters_is_the_same_on_every_rank",
        "what_dtensors_do_not_run_says_what_does",
        "whole_copies_see_what_is_written",
    ],
    "penalties": ["gradients_have_gradients", "rows_of_each_rank", "pieces", "several_backwards", "arguments_may_go"],
    "pipelines": [
        "steps_are_those_of_one_process",
        "evaluation_and_other_batches",
        "logits_stay_where_nobody_reads_them",
        "what_trains_changes_between_calls",
        "a_model_on_meta_gets_its_values_in_its_stages",
        "stages_of_a_rank_hand_over",
        "stages_of_a_rank_draw",
    ],
    "residence": ["clipping"],
    "saving_memory": ["the_step_of_the_host", "micro_batches"],
    "stage_arguments": ["gradients_of_arguments", "what_all_layers_read_crosses_all_cuts"],
    "stage_habits": [
        "numbers_buffers_and_averages",
        "numbers_made_by_hand",
        "states_of_optimizers",
        "what_the_loss_does_not_reach_has_no_gradient",
        "evaluation_of_weights_that_two_stages_read",
        "parameters_of_stages_on_the_host",
    ],
    "state": [
        "a_whole_state_dict_is_what_the_plain_model_loads",
        "no_rank_holds_two_whole_tensors",
        "transformers_saves_what_it_loads",
    ],
    "through": [
        "a_module_trains_through_another_one",
        "rows_of_each_rank_get_the_gradients_of_their_loss",
        "memory_and_bytes",
        "checkpoints_around_a_module_that_draws",
        "gradients_beside_the_loss_reach_arguments_that_lie_otherwise_then",
        "what_ranks_pass_otherwise_is_refused",
    ],
    "updates": ["training"],
}

# What four ranks may do otherwise than two: layouts on two axes, and who sends what to whom.
ON_FOUR = {
    "asked": ["rows_of_each_rank_are_asked_together", "stages_ask_too"],
    "beside": ["losses_beside_the_module", "outputs_that_are_no_rows"],
    "api": ["accumulation", "dropout", "evaluation", "inputs_and_outputs", "sharded_batches", "state_dicts"],
    "changed": [
        "parts_change_where_weights_are_split",
        "parts_change_in_stages",
        "averages_that_begin_behind_a_change",
    ],
    "counting": COUNTING,
    "hooked": ["what_hooks_keep"],
    "micro_batches": ["policies", "parts_of_each_rank"],
    "norms": ["local_ones_are_those_of_ddp", "a_cumulative_average", "synced_norms_are_global_always"],
    "penalties": ["gradients_have_gradients", "rows_of_each_rank", "pieces", "several_backwards"],
    "pipelines": [
        "steps_are_those_of_one_process",
        "other_schedules",
        "several_stages_on_a_rank",
        "stages_of_a_rank_hand_over",
        "parameters_are_cast_once_a_step",
        "a_state_goes_out_and_in_again",
        "evaluation_and_other_batches",
        "a_pipeline_is_given_or_kept",
    ],
    "stage_arguments": [
        "gradients_of_arguments",
        "models_train_through_their_inputs",
        "what_is_in_front_of_the_pipeline_trains",
        "inputs_of_a_frozen_model_are_trained",
        "rows_of_each_rank",
        "pieces_get_pieces",
        "what_all_layers_read_crosses_all_cuts",
    ],
    "stage_habits": [
        "numbers_made_by_hand",
        "states_of_optimizers",
        "what_one_rank_saved_is_refused",
        "averages_begin_before_the_first_call",
        "what_scripts_make_of_each_gradient",
        "a_model_that_some_ranks_have_dropped",
    ],
    "stored_apart": ["parameters_are_stored_in_more_pieces"],
    "through": [
        "inputs_get_the_gradients_of_one_process",
        "a_module_trains_through_another_one",
        "rows_of_each_rank_get_the_gradients_of_their_loss",
        "micro_batches",
    ],
}


def checks(file: str, of: Mapping[str, Sequence[str]] = FIRST) -> list[str]:
    return [f"check_{name}" for name in of[file]]


@pytest.mark.parametrize("file", FIRST)
def test_on_two_processes(tmp_path: Path, file: str) -> None:
    run_checks(file, 2, tmp_path, checks(file))


@pytest.mark.slow
@pytest.mark.parametrize("file", FIRST)
def test_the_rest_of_it_on_two_processes(tmp_path: Path, file: str) -> None:
    run_checks(file, 2, tmp_path, limit_s=400, but=checks(file))


@pytest.mark.slow
@pytest.mark.parametrize("file", ON_FOUR)
def test_on_four_processes(tmp_path: Path, file: str) -> None:
    run_checks(file, 4, tmp_path, checks(file, ON_FOUR), limit_s=400)


def test_models_train_on_four_processes_as_on_one(tmp_path: Path) -> None:
    run_checks("families", 4, tmp_path, ["check_random_plans", "check_a_collective_over_both_axes", "check_rings"])


def test_a_pipeline_of_two_processes_trains_as_one(tmp_path: Path) -> None:
    run_checks("pipelines", 2, tmp_path, ["check_a_small_model"])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, 4, 6, 8])
def test_three_stages_and_four_train_as_one_process(tmp_path: Path, ranks: int) -> None:
    run_checks("deep_stages", ranks, tmp_path, limit_s=400)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_stages_hold_and_send_what_was_predicted(tmp_path: Path, ranks: int) -> None:
    run_checks("stages_measured", ranks, tmp_path, limit_s=400)


def test_rings_of_two_processes_train_as_one(tmp_path: Path) -> None:
    run_checks("families", 2, tmp_path, ["check_rings"])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_contexts_of_processes_train_as_one(tmp_path: Path, ranks: int) -> None:
    run_checks("families", ranks, tmp_path, ["check_contexts"])


@pytest.mark.slow
def test_products_in_panels_train_on_four_processes_as_on_one(tmp_path: Path) -> None:
    run_checks("families", 4, tmp_path, ["check_panels", "check_optimus"])


def test_four_processes_train_on_the_mesh_of_the_plan(tmp_path: Path) -> None:
    run_checks("meshes", 4, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_models_train_as_on_one_process(tmp_path: Path, ranks: int) -> None:
    left = (
        [
            "check_gpt2",
            "check_gpt2_on_two_axes",
            "check_llama",
            "check_llama_on_two_axes",
            "check_cnn",
            "check_cnn_on_two_axes",
            "check_odd_sizes",
        ]
        if ranks == 4
        else ["check_gpt2", "check_llama", "check_cnn", "check_odd_sizes"]
    )
    run_checks("families", ranks, tmp_path, left)


@pytest.mark.slow
@pytest.mark.parametrize("check", ["steps", "families", "micro_batches", "random_plans", "patterns"])
def test_the_code_can_be_compiled(check: str, tmp_path: Path) -> None:
    run_checks("inductor", 2, tmp_path, [f"check_{check}"], limit_s=COMPILED_S)


@pytest.mark.slow
def test_so_can_that_of_two_axes(tmp_path: Path) -> None:
    run_checks("inductor", 4, tmp_path, ["check_two_axes"], limit_s=COMPILED_S)


@pytest.mark.slow
def test_a_checkpoint_of_four_ranks_continues_on_two(tmp_path: Path) -> None:
    run_checks("checkpoints", 4, tmp_path, ["check_save"])
    run_checks("checkpoints", 2, tmp_path, ["check_load"])


@pytest.mark.slow
def test_a_run_goes_on_in_another_residence_on_one_rank_and_on_two(tmp_path: Path) -> None:
    run_checks("checkpoints", 1, tmp_path, ["check_save_in_either_residence"])
    run_checks("checkpoints", 2, tmp_path, ["check_load_in_the_other_residence", "check_save_in_either_residence"])
    run_checks("checkpoints", 1, tmp_path, ["check_load_in_the_other_residence"])


def test_states_that_are_loaded_early_lie_as_the_plan_has_them(tmp_path: Path) -> None:
    run_checks("checkpoints", 2, tmp_path, ["check_states_loaded_before_the_plan_lie_as_it_has_them"])


def test_a_script_runs_under_torchrun(tmp_path: Path) -> None:
    """Without the launcher of these tests: torchrun's own environment, and a profile and memory found by themselves."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "tests/processes/standalone.py",
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    made = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110)
    told = made.stdout + made.stderr
    assert made.stdout.count("trained and agreed") == 2, told
    # gloo may abort a process that leaves, even behind a barrier (seen on busy machines): torch's, not ours. torchrun
    # then tells of itself; an error of the script's own would name its line.
    leaves = "terminate called without an active exception" in told and 'standalone.py", line' not in told
    assert made.returncode == 0 or leaves, told
