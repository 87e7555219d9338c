"""The cost and memory models: limits they must respect, whatever the constants."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planners.costs import operators
from planners.costs.generation import ServingCost
from planners.costs.memory import GIB, kv_capacity_tokens, micro_batch_tokens, training_memory
from planners.costs.sync import sync_of
from planners.costs.training import Stage, TrainingCost, TrainingLayout
from planners.hardware.catalogue import CATALOGUE, device_type
from planners.workload.demand import Demand
from planners.workload.lengths import Lengths, LogNormal, constant
from planners.workload.model import read_model
from tasks.config.trees import read_cluster
from tests.support.places import DEPLOYMENTS
from tests.support.plan import profile_of

MODEL = read_model(DEPLOYMENTS / "models" / "r1-distill-qwen-7b")
LENGTHS = LogNormal(mean=5000, q99=16000, cap=27648).lengths()
DEMAND = Demand(32, 16, 8, constant(250), LENGTHS, 28672, minibatches=4)
H800, H20 = device_type("h800"), device_type("h20")
devices = st.sampled_from(sorted(CATALOGUE))


def layout(kind: str, data: int, tensor: int = 1, machines: int = 1, zero: int = 1) -> TrainingLayout:
    return TrainingLayout((Stage(kind, data, tensor, machines),), zero)


@given(devices, st.integers(1, 16384), st.integers(64, 65536), st.integers(64, 65536))
def test_no_product_is_faster_than_the_peak_or_the_memory(name: str, m: int, n: int, k: int) -> None:
    device = CATALOGUE[name]
    seconds = operators.gemm_s(device, m, n, k)
    assert seconds >= 2 * m * n * k / device.flops_per_s
    assert seconds >= 2 * n * k / device.memory_bytes_per_s


@given(devices, st.integers(1, 1024), st.integers(1, 30000))
def test_longer_contexts_never_decode_faster(name: str, answers: int, context: int) -> None:
    costs = ServingCost(MODEL, DEMAND).iteration(CATALOGUE[name], 1, 1)
    assert costs.per_cached_token_s >= MODEL.kv_bytes_per_token / CATALOGUE[name].memory_bytes_per_s
    assert costs.per_context_s * context + costs.per_cached_token_s * answers > 0


def test_the_steady_state_is_what_its_iteration_says() -> None:
    serving, answers = ServingCost(MODEL, DEMAND), 64
    iteration = serving.iteration(H800, 2, answers)
    cached = answers * DEMAND.context
    seconds = iteration.seconds(answers, cached) + answers / DEMAND.response.mean * iteration.prefill_s
    assert serving.mean_iteration_s(H800, 2, answers) == pytest.approx(seconds)
    assert serving.tokens_per_s(H800, 2, answers) == pytest.approx(answers / seconds)


@given(devices, st.sampled_from([1, 2, 4]))
def test_the_cache_holds_what_a_replica_has_in_progress(name: str, ranks: int) -> None:
    device = CATALOGUE[name]
    answers = ServingCost(MODEL, DEMAND).most_answers(device, ranks)
    assert answers * DEMAND.context <= kv_capacity_tokens(MODEL, device, ranks)


def test_a_measured_profile_replaces_the_model() -> None:
    profile = profile_of("h20", {1: 10.0, 16: 100.0}, 50.0)
    serving = ServingCost(MODEL, DEMAND, {"h20": profile})
    assert serving.tokens_per_s(H20, 1, 16) == pytest.approx(100)
    assert serving.tokens_per_s(H800, 1, 16) == ServingCost(MODEL, DEMAND).tokens_per_s(H800, 1, 16)
    cost = TrainingCost(MODEL, DEMAND, CATALOGUE, {"h20": profile})
    assert cost.step_s(layout("h20", 4), [5e9]) == pytest.approx(DEMAND.tokens_per_step / 200 * cost.imbalance(4))


def test_training_ratio_of_the_paper_is_reproduced() -> None:
    cost = TrainingCost(MODEL, DEMAND, CATALOGUE)
    ratio = cost.step_s(layout("h20", 8), [5e9]) / cost.step_s(layout("h800", 8), [5e9])
    assert ratio == pytest.approx(8.9, rel=0.05)


@given(st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128]))
def test_packing_never_does_better_than_even(ranks: int) -> None:
    cost = TrainingCost(MODEL, DEMAND, CATALOGUE)
    assert cost.imbalance(ranks) >= 1 - 1e-9
    assert cost.imbalance(ranks) <= ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 7, 8])
@pytest.mark.parametrize(
    ("groups", "size", "prompt", "lengths"),
    [(8, 16, 60, constant(64)), (8, 8, 512, constant(64)), (8, 16, 250, LENGTHS), (32, 16, 250, LENGTHS)],
)
def test_ranks_wait_for_the_busiest_as_the_trainer_deals_answers(
    groups: int, size: int, prompt: int, lengths: Lengths, ranks: int
) -> None:
    """Of no more ranks than groups, a tenth apart at most: the trainer deals by tokens and keeps groups together."""
    from tasks.exchange.trajectories import Group, Outcome, Segment, Trajectory
    from tasks.training.packing import deal, training_group

    count, points = groups * size, lengths.points
    tokens = [int(points[int((i + 0.5) * len(points) / count)]) for i in range(count)]
    random.Random(0).shuffle(tokens)
    answers = [Trajectory((Segment((1,) * n, (-1.0,) * n, 0, "r"),), Outcome.SCORED, 1.0) for n in tokens]
    minibatch = [
        training_group(Group(g, g, np.ones(prompt), tuple(answers[g::groups])), [1.0] * size) for g in range(groups)
    ]
    busiest = max(sum(part.packed_tokens for part in hand) for hand in deal(minibatch, ranks))
    cost = TrainingCost(MODEL, Demand(groups, size, 2, constant(prompt), lengths, 28672), CATALOGUE)
    even = sum(group.packed_tokens for group in minibatch) / ranks
    assert cost.imbalance(ranks) == pytest.approx(busiest / even, rel=0.1)
    assert cost.most_ranks == count


def test_a_rank_trains_its_share_in_micro_batches_of_the_budget() -> None:
    """Of 16 answers of 5,000 tokens; the budget is met by several, or is below one."""
    even = replace(DEMAND, response=constant(5000), prompt=constant(0), minibatches=4)
    for budget, count in ((10**6, 1), (40_000, 2), (20_000, 4), (1000, 16)):
        cost = TrainingCost(MODEL, replace(even, micro_batch_tokens=budget), CATALOGUE)
        assert cost.micro_batches(8) == pytest.approx(count)


def test_a_step_is_worth_its_passes() -> None:
    """Scoring takes one where there are several updates, recomputation one where micro-batches may be large."""
    short = replace(DEMAND, longest_tokens=4096, micro_batch_tokens=1024)
    assert TrainingCost(MODEL, DEMAND, CATALOGUE).passes == 5
    assert TrainingCost(MODEL, replace(DEMAND, minibatches=1), CATALOGUE).passes == 4
    assert TrainingCost(MODEL, short, CATALOGUE).passes == 4
    for large in (replace(short, micro_batch_tokens=4097), replace(short, longest_tokens=4097)):
        assert TrainingCost(MODEL, large, CATALOGUE).passes == 5


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 8])
def test_a_reference_model_is_held_whole_by_every_rank_and_asked_once_a_step(zero: int, ranks: int) -> None:
    refers = TrainingCost(MODEL, replace(DEMAND, reference=True), CATALOGUE)
    alone, one = TrainingCost(MODEL, DEMAND, CATALOGUE), layout("h800", ranks, zero=zero)
    (more,), (less,) = refers.memory(one), alone.memory(one)
    assert more.weights - less.weights == pytest.approx(MODEL.weight_bytes)
    assert more.total - less.total == pytest.approx(MODEL.weight_bytes)
    assert refers.states_bytes(one) - alone.states_bytes(one) == pytest.approx(ranks * MODEL.weight_bytes)
    assert refers.passes == alone.passes + 1
    assert refers.step_s(one, [5e9]) > alone.step_s(one, [5e9])


def test_a_slower_link_makes_a_slower_step() -> None:
    cost = TrainingCost(MODEL, DEMAND, CATALOGUE)
    two = layout("h800", 16, machines=2)
    assert cost.step_s(two, [1e9]) > cost.step_s(two, [5e9]) > cost.step_s(two, [50e9])
    pipeline = TrainingLayout((Stage("h800", 8, 1, 1), Stage("h20", 8, 1, 1)), 1)
    assert cost.step_s(pipeline, [5e9, 5e9, 1e9]) > cost.step_s(pipeline, [5e9, 5e9, 2e9])
    assert sum(cost.layer_shares(pipeline.stages)) == pytest.approx(1)
    assert not pipeline.runs_today
    assert layout("h20", 8).runs_today


@pytest.mark.parametrize(("zero", "stage", "expected"), [(2, "two", 2 + 18 / 8), (3, "three", 18 / 8)])
def test_states_match_deepspeeds_own_formula(zero: int, stage: str, expected: float) -> None:
    """2P + 18P/d at stage 2 and 18P/d + 4·(largest layer) at stage 3; the trainer's tests ask DeepSpeed itself."""
    m = training_memory(MODEL, DEMAND, H800, data_ranks=8, tensor_ranks=1, layer_share=1.0, zero=zero)
    layer = max(MODEL.layer_parameters, MODEL.vocabulary * MODEL.hidden)
    largest = 4 * layer if zero == 3 else 0
    assert m.weights + m.gradients + m.optimiser == pytest.approx(expected * MODEL.parameters + largest, rel=1e-6)


@given(st.integers(0, 2), st.integers(1, 64))
def test_a_higher_zero_stage_never_needs_more_states(zero: int, ranks: int) -> None:
    def states(stage: int) -> float:
        m = training_memory(MODEL, DEMAND, H800, data_ranks=ranks, tensor_ranks=1, layer_share=1.0, zero=stage)
        gathered = 4 * max(MODEL.layer_parameters, MODEL.vocabulary * MODEL.hidden) if stage == 3 else 0
        return m.weights + m.gradients + m.optimiser - gathered

    assert states(zero + 1) <= states(zero) * (1 + 1e-9)


def test_memory_names_every_part_and_a_micro_batch_holds_the_longest_answer() -> None:
    m = training_memory(MODEL, DEMAND, H800, data_ranks=8, tensor_ranks=1, layer_share=1.0, zero=3)
    assert m.fits
    assert m.total == m.weights + m.gradients + m.optimiser + m.activations + m.kv + m.workspace
    assert micro_batch_tokens(DEMAND, 8) >= 27648
    assert 20 * GIB < m.total < 72 * GIB


def test_a_micro_batch_holds_the_longest_answer_the_budget_or_all_there_is() -> None:
    """Of 8 groups of 16 answers of 5,000 tokens, whose prompts have 250."""
    even = replace(DEMAND, response=constant(5000))
    for budget, ranks, tokens in (
        (1024, 8, 5250),
        (16384, 8, 16384),
        (10**6, 8, 80250),
        (10**6, 3, 3 * 250 + 640e3 / 3),
    ):
        assert micro_batch_tokens(replace(even, micro_batch_tokens=budget), ranks) == pytest.approx(tokens)
    unknown = replace(DEMAND, micro_batch_tokens=10**6)
    assert 80250 < micro_batch_tokens(unknown, 8) < 1.25 * 80250  # a rank's share varies with the answers


def test_activations_are_the_inputs_of_layers_or_all_they_keep_and_the_mask() -> None:
    def activations(budget: int) -> float:
        demand = replace(DEMAND, response=constant(500), longest_tokens=2048, micro_batch_tokens=budget)
        return (
            training_memory(MODEL, demand, H800, data_ranks=1, tensor_ranks=1, layer_share=1.0, zero=3).activations
            - 1024 * 16 * MODEL.vocabulary
        )

    width = 4 * MODEL.hidden + 3 * MODEL.intermediate + 2 * (MODEL.heads + MODEL.kv_heads) * MODEL.head_dim
    kept = 4096 * width * (MODEL.layers + 2) + 4096**2
    assert activations(4096) == pytest.approx(2 * kept)
    inputs = 8192 * (MODEL.hidden * MODEL.layers + 2 * width) + 8192**2
    assert activations(8192) == pytest.approx(2 * inputs)


def test_sync_modes_cost_what_their_formulas_say() -> None:
    topology = read_cluster(DEPLOYMENTS / "clusters" / "paper-h800-8-h20-48.yaml")
    trainer, *others = topology.nodes
    weights = MODEL.weight_bytes
    blocking = sync_of("blocking", topology, [trainer], others, weights, {})
    assert blocking.train_s == blocking.rollout_s == blocking.delay_s == pytest.approx(6 * weights / 1.5e9)
    tree = sync_of("tree", topology, [trainer], others, weights, {})
    assert tree.train_s == tree.rollout_s == pytest.approx(weights / 1.5e9 + weights / 5e9)
    overlapped = sync_of("overlapped", topology, [trainer], others, weights, {})
    assert (overlapped.transfer_s, overlapped.rollout_s) == (tree.rollout_s, pytest.approx(weights / 450e9))


def test_storage_is_written_by_the_trainer_and_loaded_by_the_replicas() -> None:
    """Each side stands still for its own part only, a measured type for what was measured."""
    topology = read_cluster(DEPLOYMENTS / "clusters" / "paper-h800-8-h20-48.yaml")
    trainer, *others = topology.nodes
    weights = MODEL.weight_bytes
    sync = sync_of("storage", topology, [trainer], others, weights, {})
    assert sync.train_s == sync.transfer_s == pytest.approx(weights / 2e9)
    assert sync.rollout_s == pytest.approx(weights / 2e9 + weights / 10e9)
    measured = profile_of("h20", {1: 1.0}, 1.0, publish_s=7.0, load_s=12.0)
    there = sync_of("storage", topology, [trainer], [trainer, *others], weights, {"h20": measured})
    assert (there.train_s, there.rollout_s, there.delay_s) == (sync.train_s, 12.0, sync.train_s + 12.0)
    back = sync_of("storage", topology, others, [trainer], weights, {"h20": measured})
    assert (back.train_s, back.rollout_s) == (7.0, sync.rollout_s)


@pytest.mark.parametrize(("element_bytes", "per_parameter"), [(2, 20), (4, 16)])
def test_states_of_all_ranks_are_those_of_one_times_their_number(element_bytes: int, per_parameter: int) -> None:
    """Without ZeRO each rank holds all: weights, gradients, and what the optimiser keeps in this type."""
    model = replace(MODEL, element_bytes=element_bytes)
    cost = TrainingCost(model, DEMAND, CATALOGUE)
    for data in (1, 4):
        layout = TrainingLayout((Stage("h20", data, 1, 1),), 0)
        assert cost.states_bytes(layout) == pytest.approx(data * per_parameter * model.parameters)
