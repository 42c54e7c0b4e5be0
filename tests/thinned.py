"""Long tests of which `make test` runs a part: every n-th case of each, the first among them; `make test-all` runs all.

file -> test -> n; 0: not at all. Chosen by time (2026-11-22): what is left out took half of all.
"""

THINNED: dict[str, dict[str, int]] = {
    "attach/test_recurrent.py": {"test_a_recurrent_network_trains_with_the_numbers_of_torch": 3},
    "attach/test_masked.py": {"test_a_loss_over_picked_rows_is_that_of_plain_pytorch": 3},
    "attach/test_transformers.py": {"test_the_whole_transformer_trains_under_any_mask": 3},
    "benchmarks/test_limits.py": {"test_two_limits_of_a_model_hold": 0},
    "benchmarks/test_replay.py": {
        "test_the_command_prints_published_predicted_and_error": 0,
        "test_copied_layers_are_what_a_longer_model_gives": 3,
    },
    "elixir/test_placing.py": {"test_the_search_is_never_worse_than_elixir_and_both_fit": 0},
    "measure/test_memory.py": {
        "test_what_a_step_holds_with_collectives_under_way_is_what_its_timeline_says": 4,
        "test_what_a_step_holds_is_what_its_plan_says": 4,
        "test_local_batch_norms_move_and_hold_what_their_plan_says": 2,
    },
    "measure/test_twin.py": {"test_what_moves_is_what_was_planned_to_the_byte": 2},
    "plans/test_best_plans.py": {"test_the_best_plan_in_little_memory_is_right": 4},
    "plans/test_local_batch_norm.py": {"test_any_legal_plan_normalises_each_part_of_the_batch": 3},
    "plans/test_matmul_roles.py": {"test_every_assignment_of_roles_is_right_and_moves_what_the_formula_says": 3},
    "plans/test_prefetch.py": {"test_prefetched_plans_are_right": 3},
    "plans/test_random_plans.py": {
        "test_any_legal_plan_of_a_small_model_is_right": 3,
        "test_any_legal_plan_of_a_family_is_right": 3,
        "test_the_simulator_and_the_lockstep_agree_to_the_last_bit": 3,
    },
    "plans/test_textbook.py": {"test_searches_of_several_meshes_in_one_process_do_not_meet": 0},
    "plans/test_traffic.py": {
        "test_random_plans_move_what_they_say": 3,
        "test_random_plans_of_families_move_what_they_say": 3,
    },
    "saving/test_memory.py": {"test_both_tiers_hold_what_the_plan_says": 4},
    "saving/test_module.py": {"test_training_gives_the_same_bits_wherever_things_lie": 4},
    "saving/test_running.py": {
        "test_any_legal_plan_of_a_small_model_is_right": 3,
        "test_any_legal_plan_of_a_family_is_right": 3,
        "test_what_is_saved_and_where_things_lie_changes_no_bit": 4,
    },
    "saving/test_timeline.py": {"test_what_is_played_is_launched_and_waited_for_as_in_the_program": 3},
    "saving/test_updates.py": {
        "test_training_gives_the_same_bits_as_with_updates_that_are_waited_for": 4,
    },
    "scale/test_totals.py": {
        "test_the_plan_of_gpt2_at_another_batch": 0,
        "test_at_the_plans_own_sizes_it_is_the_plan": 2,
    },
    "search/test_limits.py": {
        "test_with_what_would_do_there_is_a_plan_that_takes_hardly_less_and_below_it_none": 3,
    },
    "search/test_policies.py": {"test_a_baseline_that_does_not_fit_says_what_it_needs": 0},
    "search/test_simulated.py": {"test_the_plan_fits_with_what_is_in_flight": 4},
    "solver/test_race.py": {"test_a_race_finds_what_the_integer_program_proves_and_repeats_itself": 0},
    "sparing/test_exact.py": {"test_any_picks_cost_what_the_problem_says_and_hold_no_more": 3},
    "sparing/test_exhaustive.py": {"test_the_solver_finds_the_best_of_all_combinations": 3},
    "timeline/test_events.py": {
        "test_what_is_played_is_launched_and_waited_for_as_in_the_emitted_program": 3,
        "test_twenty_thousand_nodes_are_played": 2,
    },
    "trace/test_families.py": {"test_two_traces_are_one_program": 3},
    "trace/test_precision.py": {
        "test_casts_stand_at_their_first_reader_or_behind_what_they_cast": 4,
        "test_only_the_order_changes": 3,
    },
}  # fmt: skip
