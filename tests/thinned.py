"""Long tests of which `make test` runs a part: every n-th case of each, the first among them; `make test-all` runs all.

file -> test -> n; 0: not at all. Chosen by time (2026-11-23, 2026-11-25): `make test` is to take less than 8 minutes.
Of what is left out CI runs a third, another one each day.
"""

THINNED: dict[str, dict[str, int]] = {
    "assemble/test_allowed.py": {
        "test_every_point_of_a_curve_does_what_is_allowed": 3,
    },
    "assemble/test_exact.py": {
        "test_any_picks_cost_what_the_problem_says_and_hold_no_more": 10,
        "test_so_do_the_picks_of_a_policy": 2,
        "test_the_traced_graph_comes_back_from_the_one_that_runs": 2,
    },
    "assemble/test_exhaustive.py": {
        "test_the_programs_have_all_that_there_is_to_choose": 0,
        "test_the_solver_finds_the_best_of_all_combinations": 20,
    },
    "assemble/test_pins.py": {
        "test_any_picks_cost_what_the_problem_says": 6,
        "test_where_memory_is_short_the_rest_is_still_open": 0,
    },
    "attach/test_autocast.py": {
        "test_autocast_gives_the_numbers_that_it_gives_in_torch": 2,
    },
    "attach/test_complex.py": {
        "test_a_model_of_complex_numbers_trains_as_plain_pytorch_does": 8,
        "test_what_is_asked_of_a_complex_weight_has_its_gradient": 3,
    },
    "attach/test_functions.py": {
        "test_the_backward_that_is_written_is_the_one_that_runs": 2,
    },
    "attach/test_guards.py": {
        "test_a_change_between_calls_means_what_it_means_in_torch": 6,
    },
    "attach/test_kept_plans.py": {
        "test_a_kept_plan_that_contradicts_itself_is_made_anew": 2,
    },
    "attach/test_masked.py": {
        "test_a_loss_over_picked_rows_is_that_of_plain_pytorch": 4,
    },
    "attach/test_micro_batches.py": {
        "test_a_loss_is_that_of_the_whole_batch": 4,
        "test_another_batch_has_as_many_or_as_few_more_as_divide_it": 2,
        "test_attention_over_other_positions_is_cut": 0,
    },
    "attach/test_places.py": {
        "test_a_script_compiles_without_home": 0,
    },
    "attach/test_recurrent.py": {
        "test_a_recurrent_network_trains_with_the_numbers_of_torch": 6,
        "test_a_second_program_a_copy_and_a_loaded_state_are_right": 2,
        "test_an_lstm_reads_inputs_as_they_come": 2,
        "test_the_state_goes_out_and_in_again": 3,
    },
    "attach/test_stage_rounds.py": {
        "test_a_micro_batch_is_of_the_same_rows_in_all_stages": 2,
    },
    "attach/test_transformers.py": {
        "test_attention_trains_with_and_without_its_weights": 3,
        "test_the_whole_transformer_trains_under_any_mask": 6,
    },
    "benchmarks/test_large.py": {
        "test_copies_hide_and_the_step_on_the_host_does_where_it_overlaps": 0,
    },
    "benchmarks/test_limits.py": {
        "test_two_limits_of_a_model_hold": 0,
    },
    "benchmarks/test_replay.py": {
        "test_a_graph_of_another_batch_is_what_tracing_gives": 0,
        "test_copied_layers_are_what_a_longer_model_gives": 0,
        "test_the_command_prints_published_predicted_and_error": 0,
        "test_the_published_tensor_parallel_is_megatrons_with_sequence_parallel": 0,
        "test_torch_recomputes_the_same_products_and_frees_about_the_same_memory": 0,
    },
    "benchmarks/test_replay_pipelines.py": {
        "test_a_layer_leaves_to_backward_what_korthikanti_counts": 3,
    },
    "calibrate/test_fit.py": {
        "test_fits_of_anything_at_all_are_lawful": 2,
    },
    "cost_models/test_mutants.py": {
        "test_a_damaged_profile_is_refused_or_says_what_it_says": 13,
    },
    "decide/test_stages.py": {
        "test_a_plan_in_stages_is_right_and_each_of_its_plans_is_legal": 2,
    },
    "diff/test_diff.py": {
        "test_seconds_by_class_add_up_to_each_step_and_to_the_difference": 0,
        "test_what_is_recomputed_and_offloaded_is_told": 0,
    },
    "emit/test_attention.py": {
        "test_numbers_are_those_of_the_formula": 2,
    },
    "emit/test_halves.py": {
        "test_both_halves_are_the_whole": 3,
        "test_gradients_of_weights_come_second": 2,
    },
    "emit/test_kernels.py": {
        "test_a_program_calls_what_its_device_has": 24,
        "test_attention_that_drops_has_a_kernel": 9,
    },
    "emit/test_whole_graphs.py": {
        "test_a_function_is_one_graph": 15,
        "test_micro_batches_are": 0,
        "test_patterns_are": 0,
        "test_recurrent_layers_are": 0,
    },
    "examples/test_factories.py": {
        "test_a_small_variant_traces_to_a_training_step": 2,
    },
    "examples/test_train_lm.py": {
        "test_what_has_no_equal_parts_is_refused_before_anything_is_planned": 0,
    },
    "lower/test_lower.py": {
        "test_a_random_plan_becomes_a_program": 18,
        "test_so_does_one_with_the_host_in_it": 12,
        "test_the_scan_holds_what_the_timeline_holds": 0,
        "test_without_overlap_every_wait_stands_behind_its_launch": 0,
    },
    "lower/test_placed.py": {
        "test_values_lie_where_it_is_said_and_products_copy_what_is_said": 5,
    },
    "lower/test_sums.py": {
        "test_any_picks_cost_what_the_problem_says_and_hold_no_more": 3,
        "test_each_is_added_up_as_it_is_made_and_gone": 2,
    },
    "lower/test_verify.py": {
        "test_a_program_with_one_thing_wrong_is_none": 2,
    },
    "measure/test_command.py": {
        "test_two_processes_move_what_the_plan_says": 0,
        "test_two_stages_send_and_hold_what_their_pipeline_says": 0,
        "test_what_cannot_be_measured_is_told": 3,
    },
    "measure/test_forged_store.py": {
        "test_a_damaged_database_loses_times_and_changes_none": 10,
    },
    "measure/test_memory.py": {
        "test_local_batch_norms_move_and_hold_what_their_plan_says": 0,
        "test_what_a_step_holds_is_what_its_plan_says": 4,
        "test_what_a_step_holds_with_collectives_under_way_is_what_its_timeline_says": 4,
    },
    "measure/test_operators.py": {
        "test_equal_layers_are_timed_once_and_names_do_not_count": 0,
        "test_every_call_of_every_strategy_runs_alone_and_gives_its_local_results": 3,
        "test_every_operator_of_a_small_model_gets_a_time": 2,
        "test_keys_are_the_same_in_another_process": 0,
    },
    "measure/test_report.py": {
        "test_the_parts_of_a_prediction_are_the_plan": 3,
    },
    "measure/test_twin.py": {
        "test_memory_is_that_of_the_optimizer_at_hand": 3,
        "test_what_moves_is_what_was_planned_to_the_byte": 4,
    },
    "page/test_blocks.py": {
        "test_blocks_add_up_to_the_timeline": 2,
    },
    "page/test_browser.py": {
        "test_it_fits_any_width_and_says_nothing": 0,
    },
    "page/test_page.py": {
        "test_the_same_plan_gives_the_same_bytes": 0,
    },
    "pipeline/test_schedules.py": {
        "test_rates_of_bubbles_are_those_that_are_published": 3,
    },
    "plan/test_dot.py": {
        "test_the_form_of_random_plans_is_right": 2,
        "test_twelve_layers_take_no_more_room_than_two": 0,
    },
    "plan/test_mutants.py": {
        "test_a_damaged_plan_is_refused_or_the_same": 20,
        "test_a_forged_plan_is_refused_or_runs_as_the_model_does": 30,
        "test_the_commands_say_it_in_one_sentence": 5,
    },
    "plan/test_store.py": {
        "test_random_plans_read_back": 2,
    },
    "plans/test_attention_patterns.py": {
        "test_it_holds_what_it_says": 15,
        "test_its_numbers_are_those_of_one_process_and_its_bytes_those_of_the_plan": 12,
    },
    "plans/test_best_plans.py": {
        "test_price_and_memory_add_up_again": 3,
        "test_the_best_plan_in_little_memory_is_right": 0,
        "test_the_best_plan_is_right_and_proven": 24,
        "test_the_best_plan_is_right_in_float64": 4,
    },
    "plans/test_global_meaning.py": {
        "test_norms_mean_the_whole": 4,
    },
    "plans/test_local_batch_norm.py": {
        "test_any_legal_plan_normalises_each_part_of_the_batch": 12,
    },
    "plans/test_matmul_roles.py": {
        "test_every_assignment_of_roles_is_right_and_moves_what_the_formula_says": 3,
    },
    "plans/test_memory.py": {
        "test_a_refusal_names_the_least_memory_and_it_is_the_least": 4,
        "test_more_memory_is_never_slower_and_the_limit_holds": 6,
    },
    "plans/test_prefetch.py": {
        "test_gradients_summed_together_are_right_and_move_the_same_bytes": 2,
        "test_prefetched_plans_are_right": 3,
    },
    "plans/test_random_plans.py": {
        "test_any_legal_plan_of_a_family_is_right": 12,
        "test_any_legal_plan_of_a_small_model_is_right": 32,
        "test_the_simulator_and_the_lockstep_agree_to_the_last_bit": 6,
    },
    "plans/test_rings.py": {
        "test_it_holds_what_it_says": 18,
        "test_its_numbers_are_those_of_one_process_and_its_bytes_those_of_the_plan": 10,
    },
    "plans/test_rows.py": {
        "test_only_rows_are_summed_in_place_and_nobody_else_has_them": 6,
    },
    "plans/test_textbook.py": {
        "test_searches_of_several_meshes_in_one_process_do_not_meet": 0,
        "test_sizes_that_do_not_divide_are_never_split": 5,
    },
    "plans/test_traffic.py": {
        "test_random_plans_move_what_they_say": 18,
        "test_random_plans_of_families_move_what_they_say": 6,
        "test_the_best_plan_moves_what_it_says": 3,
    },
    "price/test_joined_axes.py": {
        "test_no_plan_of_a_finer_mesh_is_worse": 4,
    },
    "processes/test_faults.py": {
        "test_all_ranks_end_with_a_reason": 0,
    },
    "processes/test_processes.py": {
        "test_models_train_on_four_processes_as_on_one": 0,
        "test_on_two_processes": 99,
        "test_rings_of_two_processes_train_as_one": 0,
        "test_states_that_are_loaded_early_lie_as_the_plan_has_them": 0,
    },
    "rewrite/test_cast_once.py": {
        "test_any_picks_of_a_round_cost_what_the_problem_says_and_hold_no_more": 4,
        "test_every_cast_of_a_parameter_goes_and_no_number_changes": 2,
    },
    "rewrite/test_expose_choices.py": {
        "test_no_chain_leaves_its_region": 3,
        "test_random_operators_and_readers_of_changed_buffers_never_run_again": 3,
        "test_what_backward_itself_reads_is_not_dropped": 2,
    },
    "rewrite/test_micro_batches.py": {
        "test_the_rounds_together_are_the_step": 5,
    },
    "rewrite/test_reduce_once.py": {
        "test_a_step_gives_what_one_process_gives": 4,
        "test_any_picks_cost_what_the_problem_says_and_hold_no_more": 2,
        "test_rows_are_summed_where_they_lie": 3,
        "test_stages_sum_their_own": 2,
    },
    "rewrite/test_stages.py": {
        "test_llama_can_be_cut_behind_each_of_its_layers": 0,
        "test_stages_together_are_the_model": 7,
        "test_what_backward_brings_back_is_cut_where_the_model_is": 4,
    },
    "rewrite/test_stored_apart.py": {
        "test_a_plan_file_says_how_a_parameter_is_stored_and_forged_ones_are_refused": 0,
        "test_any_picks_cost_what_the_problem_says_and_hold_no_more": 2,
    },
    "rules/test_attention_patterns.py": {
        "test_every_offer_gives_what_the_operator_gives": 9,
        "test_ranks_that_torch_simulates_say_the_same": 3,
    },
    "rules/test_summa.py": {
        "test_panels_give_what_the_operator_gives": 3,
    },
    "saving/test_copies.py": {
        "test_collectives_and_copies_move_the_bytes_of_the_plan": 3,
        "test_copies_may_come_as_late_as_they_are_waited_for": 6,
    },
    "saving/test_late_updates.py": {
        "test_an_error_of_the_thread_reaches_who_comes_next": 2,
        "test_the_forward_waits_for_each_parameter_alone": 2,
    },
    "saving/test_memory.py": {
        "test_both_tiers_hold_what_the_plan_says": 16,
    },
    "saving/test_module.py": {
        "test_frozen_parameters_on_the_host_have_no_gradient_and_no_state": 0,
        "test_gradients_of_several_backwards_add_up": 2,
        "test_training_gives_the_same_bits_wherever_things_lie": 8,
    },
    "saving/test_running.py": {
        "test_any_legal_plan_of_a_family_is_right": 0,
        "test_any_legal_plan_of_a_small_model_is_right": 12,
        "test_the_simulator_and_the_lockstep_agree_to_the_last_bit": 2,
        "test_what_is_saved_and_where_things_lie_changes_no_bit": 4,
    },
    "saving/test_steady.py": {
        "test_a_step_is_that_of_two_played_by_hand": 2,
        "test_a_step_takes_no_longer_than_alone_and_no_less_than_its_busiest_stream": 4,
    },
    "saving/test_timeline.py": {
        "test_prices_of_a_parameter_are_those_of_its_residence": 4,
        "test_what_is_played_is_launched_and_waited_for_as_in_the_program": 30,
        "test_what_lies_on_the_host_is_told": 3,
        "test_with_overlap_the_same_work_is_done_within_its_bounds": 4,
        "test_without_overlap_a_plan_takes_and_holds_what_it_says": 8,
    },
    "saving/test_told.py": {
        "test_a_plan_survives_its_file": 2,
    },
    "saving/test_updates.py": {
        "test_a_program_that_ends_makes_its_updates_first": 0,
        "test_optimizers_that_take_one_number_at_a_time_may_be_wrapped": 8,
        "test_training_gives_the_same_bits_as_with_updates_that_are_waited_for": 0,
    },
    "scale/test_grow.py": {
        "test_shapes_are_those_of_a_trace_at_the_other_size": 3,
    },
    "scale/test_operators.py": {
        "test_closed_forms_equal_numbers": 3,
    },
    "scale/test_study.py": {
        "test_a_search_at_another_size_is_the_search_of_a_trace_there": 0,
        "test_rows_grow_one_thing_at_a_time_and_the_batch_with_the_axis_that_splits_it": 0,
    },
    "scale/test_totals.py": {
        "test_at_the_plans_own_sizes_it_is_the_plan": 4,
        "test_larger_it_is_the_plan_of_a_new_trace": 3,
        "test_the_plan_of_gpt2_at_another_batch": 0,
    },
    "search/elixir/test_placing.py": {
        "test_a_traced_opt_has_the_parameters_and_steps_of_the_golden_tables": 0,
        "test_the_search_is_never_worse_than_elixir_and_both_fit": 0,
    },
    "search/test_batch_norm.py": {
        "test_a_plan_file_is_of_the_statistics_that_were_asked_for": 2,
        "test_the_baseline_of_ddp_has_its_statistics_and_takes_nobodys_place": 0,
    },
    "search/test_command.py": {
        "test_baselines_change_no_plan": 3,
        "test_memory_is_a_size_or_a_share_and_by_default_what_the_profile_has": 2,
    },
    "search/test_command_pipe.py": {
        "test_bad_arguments_get_one_sentence": 3,
        "test_stages_that_are_named_are_the_only_ones": 0,
        "test_what_people_do_by_hand_stands_beside_it": 0,
        "test_wrong_numbers_of_stages_get_one_sentence": 2,
    },
    "search/test_curve.py": {
        "test_a_picture_that_cannot_be_written_leaves_the_old_one": 0,
        "test_step_time_never_rises_with_memory_and_every_plan_fits": 2,
        "test_the_command_prints_the_curve_and_draws_it": 0,
        "test_the_curve_is_part_of_the_object": 0,
        "test_the_ends_are_the_least_that_does_and_what_the_fastest_plan_needs": 0,
        "test_what_is_not_named_is_not_done": 0,
        "test_what_is_recomputed_and_offloaded_is_counted": 0,
    },
    "search/test_interrupted.py": {
        "test_a_json_object_says_so": 0,
        "test_the_best_plan_so_far_is_printed_and_written": 2,
    },
    "search/test_layouts.py": {
        "test_what_keeps_everything_is_carried_to_the_problem_in_which_all_may_be_recomputed_and_offloaded": 2,
    },
    "search/test_less_memory.py": {
        "test_a_limit_that_is_just_missed_costs_little_however_little_time_there_is": 0,
    },
    "search/test_limits.py": {
        "test_with_what_would_do_there_is_a_plan_that_takes_hardly_less_and_below_it_none": 3,
    },
    "search/test_meshes.py": {
        "test_a_renamed_plan_is_that_of_a_mesh_with_these_names": 2,
        "test_it_is_the_same_every_time": 0,
        "test_no_mesh_searched_by_itself_is_better": 3,
        "test_what_was_skipped_could_not_have_been_better": 2,
        "test_where_nothing_fits_it_is_said_what_would": 0,
    },
    "search/test_micro_batches.py": {
        "test_with_less_memory_there_are_more_of_them": 0,
    },
    "search/test_pipelines.py": {
        "test_a_pipeline_is_what_its_schedule_plays": 9,
        "test_an_encoder_and_a_decoder_are_cut": 0,
        "test_several_stages_on_a_rank_are_what_their_schedule_plays": 2,
        "test_the_quicker_schedule_is_taken": 0,
    },
    "search/test_policies.py": {
        "test_a_baseline_computes_what_the_model_computes": 8,
        "test_a_baseline_that_does_not_fit_says_what_it_needs": 0,
        "test_repeated_layers_can_be_tied_under_a_policy": 2,
        "test_the_search_is_never_worse_than_a_baseline": 4,
    },
    "search/test_problem_file.py": {
        "test_in_little_memory_it_has_the_limit_and_costs_the_same": 2,
        "test_with_all_the_memory_there_is_it_costs_what_the_plan_takes_in_sum": 2,
    },
    "search/test_rounds.py": {
        "test_a_bound_proven_with_more_memory_is_that_of_less_in_the_same_buckets": 0,
        "test_a_large_search_begins_among_known_layouts_and_is_the_same_twice": 0,
    },
    "search/test_sequence_policies.py": {
        "test_bytes_of_attention_are_those_of_the_formulas": 2,
        "test_numbers_are_those_of_one_process_and_attention_does_what_the_name_says": 12,
        "test_they_run_under_local_tensors": 3,
    },
    "search/test_simulated.py": {
        "test_gathers_that_hide_cost_no_time_so_parameters_may_stay_in_pieces": 0,
        "test_no_plan_computes_for_less_than_the_bound_of_simulated_time": 3,
        "test_one_rank_that_copies_to_its_host_and_back_is_simulated": 0,
        "test_somewhere_it_is_quicker_than_all_of_them": 0,
        "test_the_plan_computes_what_the_model_computes": 3,
        "test_the_plan_fits_with_what_is_in_flight": 0,
        "test_the_plan_is_as_quick_as_the_quickest_of_the_least_sum_and_the_baselines": 6,
        "test_the_same_question_gives_the_same_plan": 0,
        "test_the_text_says_simulated_where_the_object_has_a_simulated_time": 0,
    },
    "search/test_splits.py": {
        "test_a_plan_does_what_is_pinned_and_says_so": 4,
        "test_so_is_one_of_attention_in_the_words_of_the_plan_too": 2,
        "test_what_cannot_be_is_refused": 2,
        "test_where_nothing_fits_the_pins_are_said": 0,
    },
    "search/test_stage_meshes.py": {
        "test_the_best_arrangement_is_at_least_as_quick_as_each_by_itself": 0,
        "test_the_time_limit_and_ctrl_c_leave_the_best_by_then": 0,
        "test_where_nothing_fits_the_least_that_would_is_said": 0,
    },
    "simulate/test_events.py": {
        "test_a_collective_starts_after_the_kernels_issued_before_it": 0,
        "test_collectives_come_in_the_order_of_the_emitted_program": 6,
        "test_faster_links_never_make_a_step_slower": 0,
        "test_rows_of_gradients_keep_a_step_within_its_bounds": 16,
        "test_twenty_thousand_nodes_are_played": 0,
        "test_values_are_ready_before_they_are_read": 4,
        "test_with_overlap_the_same_work_is_done_within_its_bounds": 16,
        "test_without_overlap_a_random_plan_takes_and_holds_what_it_says": 15,
        "test_without_overlap_each_part_takes_what_the_plan_says": 3,
        "test_without_overlap_the_best_plan_takes_and_holds_what_it_says": 0,
    },
    "simulate/test_prefetch.py": {
        "test_so_it_is_for_plans_that_gather_weights_and_for_those_that_sum_gradients_in_rows": 3,
        "test_the_sum_of_a_gradient_is_waited_for_as_many_products_later": 3,
        "test_weights_are_fetched_ahead_through_their_casts": 0,
        "test_what_is_played_is_launched_and_waited_for_as_in_the_emitted_program": 0,
    },
    "solver/test_cut.py": {
        "test_a_quick_answer_claims_nothing_wrong_and_is_no_worse_than_its_start": 2,
    },
    "solver/test_exactness.py": {
        "test_backend_matches_trying_everything": 3,
        "test_presolve_keeps_a_cheapest_solution": 24,
    },
    "solver/test_files.py": {
        "test_a_problem_survives_our_own_file": 2,
        "test_the_command_line_says_what_is_wrong_and_exits_with_2": 0,
    },
    "solver/test_lagrange.py": {
        "test_the_bound_is_never_above_the_optimum_with_the_dual_alone": 0,
    },
    "solver/test_mutants.py": {
        "test_a_damaged_archive_is_refused": 4,
        "test_a_damaged_contest_file_is_refused_or_says_what_it_says": 13,
        "test_a_damaged_problem_is_refused_or_says_what_it_says": 13,
    },
    "solver/test_pipeline.py": {
        "test_a_large_chain_is_cut_better_than_evenly": 3,
        "test_no_cut_is_cheaper_and_none_is_missed": 9,
    },
    "solver/test_race.py": {
        "test_a_race_finds_what_the_integer_program_proves_and_repeats_itself": 0,
        "test_a_search_that_is_stopped_gives_what_it_has": 2,
    },
    "trace/test_attention.py": {
        "test_a_cache_that_is_asked_for_is_left_out_and_told": 2,
        "test_a_mask_that_is_an_argument_stays_and_is_told_of": 0,
        "test_a_window_is_a_mask_where_it_hides_something": 2,
        "test_any_legal_plan_drops_in_backward_what_it_dropped_in_forward": 2,
        "test_numbers_and_gradients_are_those_of_the_model": 6,
        "test_packed_sequences_are_looked_for_where_transformers_does": 3,
        "test_positions_are_those_that_the_model_uses": 12,
    },
    "trace/test_attention_layout.py": {
        "test_it_may_lie_otherwise_than_behind_torchs_kernels": 2,
    },
    "trace/test_autocast.py": {
        "test_autocast_of_another_device_does_nothing": 0,
        "test_float16_and_no_autocast_are_other_graphs": 0,
        "test_the_casts_are_those_of_cuda": 3,
    },
    "trace/test_capture.py": {
        "test_capture_leaves_the_model_as_it_is": 3,
    },
    "trace/test_families.py": {
        "test_the_graph_on_one_rank_is_the_model": 2,
        "test_two_traces_are_one_program": 9,
    },
    "trace/test_installed.py": {
        "test_attentions_and_hidden_states_come_out_at_every_call": 0,
        "test_hidden_states_are_there_at_every_call": 0,
        "test_what_is_installed_once_works_at_every_call": 2,
    },
    "trace/test_local_norm.py": {
        "test_a_norm_over_the_batch_takes_it_in_parts": 4,
        "test_any_legal_plan_has_the_statistics_of_one_process": 9,
        "test_what_ranks_would_have_parts_of_in_another_way_is_refused": 3,
    },
    "trace/test_precision.py": {
        "test_casts_stand_at_their_first_reader_or_behind_what_they_cast": 12,
        "test_gradients_are_summed_while_backward_goes_on": 0,
        "test_only_the_order_changes": 0,
    },
    "what_if/test_command.py": {
        "test_both_answers_stand_beside_each_other": 2,
    },
    "what_if/test_question.py": {
        "test_no_change_of_the_limit_is_worth_more_than_the_price_of_memory_says": 2,
        "test_nothing_is_quicker_than_proven_and_the_best_plan_no_slower_than_the_same": 2,
    },
}
