"""What a person gives the planner: clusters, models, lengths, demands; and what they are told when it is wrong."""

import itertools
import json
import math
import re
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planners.errors import UserError
from planners.hardware.catalogue import CATALOGUE, device_type
from planners.hardware.topology import ClusterFile, parse_cluster
from planners.workload.demand import Demand, demand_of
from planners.workload.lengths import Histogram, Lengths, LogNormal, Samples, constant
from planners.workload.model import model_from_config, read_model
from planners.workload.step import Workload
from tasks.config.trees import read_cluster
from tests.support.places import REPOSITORY
from tests.support.plan import SMOLLM2

CLUSTERS = sorted((REPOSITORY / "deployments" / "clusters").glob("*.yaml"))
MODELS = sorted((REPOSITORY / "deployments" / "models").iterdir())
WANTED = "h100 h200 h800 h800-paper h20 a100-40 a100-80 l40s a10g l4 rtx-4090 a6000 b200"


def cluster(**changes: object) -> ClusterFile:
    tree: dict[str, object] = {
        "name": "small",
        "machines": [
            {"name": "a", "device_type": "h800", "count": 1, "devices": 8},
            {"name": "b", "device_type": "h20", "count": 2, "devices": 8},
        ],
        "links": [
            {"between": ["h20", "h20"], "gb_per_s": 5},
            {"between": ["h800", "h20"], "gb_per_s": 1.5},
        ],
    }
    return ClusterFile.model_validate(tree | changes)


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_shipped_clusters_load(path: Path) -> None:
    topology = read_cluster(path)
    assert topology.name == path.stem
    assert topology.devices == sum(topology.counts.values()) > 0


def test_the_large_shipped_cluster_has_1024_devices_of_six_types() -> None:
    topology = read_cluster(REPOSITORY / "deployments" / "clusters" / "mix-1024.yaml")
    assert (topology.devices, len(topology.types)) == (1024, 6)


def test_the_cluster_file_of_the_readme_loads(tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)
    (tmp_path / "two-kinds.yaml").write_text(block)
    topology = read_cluster(tmp_path / "two-kinds.yaml")
    assert [node.name for node in topology.nodes] == ["fast-0", "cheap-0", "cheap-1"]
    assert topology.types["h20"].usd_per_h == 1.5


@pytest.mark.parametrize(
    ("name", "billions", "kv_bytes"),
    [("1.5b", 1.777, 28672), ("7b", 7.616, 57344), ("14b", 14.770, 196608)],
)
def test_shipped_models_have_their_published_sizes(name: str, billions: float, kv_bytes: int) -> None:
    model = read_model(REPOSITORY / "deployments" / "models" / f"r1-distill-qwen-{name}")
    assert model.parameters / 1e9 == pytest.approx(billions, abs=1e-3)
    assert model.kv_bytes_per_token == kv_bytes
    assert len(MODELS) == 3


def test_every_device_has_positive_figures_and_a_source() -> None:
    assert set(WANTED.split()) <= set(CATALOGUE)
    for device in CATALOGUE.values():
        assert min(device.flops_per_s, device.memory_bytes_per_s, device.memory_bytes, device.link_bytes_per_s) > 0
        assert device.source
        assert device.training_source
        assert device.efficiency.fitted_on in {*CATALOGUE, "itself"}


def test_an_unknown_device_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'h800'"):
        device_type("H800-SXN")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"machines": []}, "is empty"),
        ({"links": [{"between": ["h20", "h20"], "gb_per_s": 0}]}, "must be positive"),
        ({"links": [{"between": ["h20", "h20"], "gb_per_s": 5}]}, "a-0 .*b-0"),
        ({"links": []}, "is disconnected"),
        ({"links": [{"between": ["h20", "l4"], "gb_per_s": 5}]}, "names l4"),
        ({"links": [{"between": ["a-0", "b-9"], "gb_per_s": 5}]}, r"names b-9, .* did you mean 'b-\d'"),
        ({"links": [{"between": ["a-0", "a-0"], "gb_per_s": 5}]}, "link_gb_per_s of its group"),
        ({"links": [{"between": ["a-0", "h20"], "gb_per_s": 5}]}, "two device types or two different machines"),
        ({"links": [{"between": ["h20", "h20"], "gb_per_s": 5}] * 2}, "the link h20 - h20 twice"),
        (
            {"machines": [{"name": "a", "device_type": "a100", "devices": 1}]},
            r"device type 'a100' \(did you mean a100-80 or a100-40\?\): known types are a100-40, ",
        ),
        ({"machines": [{"name": "a", "device_type": "zzz", "devices": 1}]}, "'zzz': known types are a100-40, "),
        ({"machines": [{"name": "a", "device_type": "h20", "devices": 1}] * 2}, "two machines called a-0"),
    ],
)
def test_bad_clusters_are_refused_in_words(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_cluster(cluster(**changes))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "c.yaml is empty; shipped ones lie in .*clusters"),
        ("- 1\n", "must hold keys and values, not a list"),
        ("name: c\nname: d\n", "line 2: the key 'name' is there twice"),
        ("name: c\nmachins: []\n", r"unknown key 'machins' \(did you mean 'machines'\?\)"),
        ("machines: [{nmae: a, device_type: h20, devices: 8}]", r"'machines.0.nmae' \(did you mean 'name'\?\)"),
        ("machines: [{name: a, device_type: h20, devices: 8, count: 0}]", r"'machines.0.count' is 0: .* equal to 1"),
        ("machines: [{name: a, device_type: h20, devices: 8, count: 1000000000}]", "less than or equal to 10000"),
        ("name: c\nmachines: []\nlinks: [{between: [a, b], gb_per_s: 1.0e+300}]", "less than or equal to 1000000"),
        ("machines: [{name: a, device_type: h20, devices: true}]", "should not be true or false"),
        ("name: c\nmachines: []\nlinks: [{between: [a, b]}]", "'links.0.gb_per_s' is missing"),
        ("name: c\nmachines: []\nstorage: {read_gb_per_s: 0}", "'storage.read_gb_per_s' is 0"),
    ],
)
def test_a_cluster_file_is_refused_like_an_experiment_file(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        read_cluster(tmp_path / "c.yaml")


def test_a_missing_cluster_file_is_answered_with_the_place_of_the_shipped_ones(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"lie in {CLUSTERS[0].parent}"):
        read_cluster(tmp_path / "absent.yaml")
    with pytest.raises(UserError, match="is a directory: name one cluster file"):
        read_cluster(tmp_path)


@pytest.mark.parametrize("price", ["-1", ".inf", ".nan"])
def test_a_price_that_is_none_is_refused_with_its_place(price: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"name: c\nmachines:\n  - {{name: a, device_type: h20, devices: 8, usd_per_h: {price}}}\n")
    with pytest.raises(UserError, match=r"machines\.0\.usd_per_h"):
        read_cluster(path)


def test_links_go_by_pair_of_types_unless_machines_say_otherwise() -> None:
    links = [
        {"between": ["h20", "h20"], "gb_per_s": 5},
        {"between": ["h800", "h20"], "gb_per_s": 1.5},
        {"between": ["a-0", "b-1"], "gb_per_s": 3},
    ]
    topology = parse_cluster(cluster(links=links))
    a, b, c = topology.nodes
    assert topology.link(a, b) == 1.5e9
    assert topology.link(a, c) == topology.link(c, a) == 3e9
    assert topology.link(b, c) == 5e9
    assert topology.link(b, b) == 450e9
    assert topology.best_link("h20", "h800") == 3e9


def test_groups_of_one_type_at_different_prices_are_types_of_their_own() -> None:
    machines = [
        {"name": "own", "device_type": "h20", "devices": 8},
        {"name": "spot", "device_type": "h20", "devices": 8, "usd_per_h": 0.5},
    ]
    links = [{"between": ["h20", "h20"], "gb_per_s": 5}]
    topology = parse_cluster(cluster(machines=machines, links=links))
    assert {t: d.usd_per_h for t, d in topology.types.items()} == {"h20@own": 1.85, "h20@spot": 0.5}
    a, b = topology.nodes
    assert topology.link(a, b) == 5e9
    exact = {"between": ["h20@own", "h20@spot"], "gb_per_s": 2}
    for order in ([exact, *links], [*links, exact]):
        topology = parse_cluster(cluster(machines=machines, links=order))
        a, b = topology.nodes
        assert topology.link(a, b) == 2e9, "the order of links decided"


def test_mixtures_of_experts_and_unknown_architectures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="mixture of experts"):
        model_from_config({"model_type": "qwen3_moe", "num_experts": 64}, "m")
    with pytest.raises(UserError, match="supported are llama"):
        model_from_config({"model_type": "gpt2"}, "m")
    with pytest.raises(UserError, match="lacks 'hidden_size'"):
        model_from_config({"model_type": "llama", "num_attention_heads": 8}, "m")
    with pytest.raises(UserError, match="no model configuration"):
        read_model(tmp_path)


def test_tied_embeddings_count_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    assert read_model(tmp_path).parameters == 134_515_008  # SmolLM2-135M as its model card counts


def test_a_log_normal_keeps_its_mean_and_quantile() -> None:
    lengths = LogNormal(mean=5000, q99=16000, cap=27648).lengths()
    assert lengths.mean == pytest.approx(5000, rel=0.01)
    assert lengths.quantile(0.99) == pytest.approx(16000, rel=0.01)
    assert lengths.longest == 27648
    with pytest.raises(ValueError, match="q99 must lie"):
        LogNormal(mean=10, q99=1000, cap=2000)


def test_a_histogram_reproduces_its_shares() -> None:
    lengths = Histogram(edges=(0, 10, 20, 40), counts=(1, 0, 3)).lengths()
    assert sum(p <= 10 for p in lengths.points) / len(lengths.points) == pytest.approx(0.25, abs=0.01)
    assert not any(10.01 < p < 19.99 for p in lengths.points)
    with pytest.raises(ValueError, match="need 2 counts"):
        Histogram(edges=(0, 1, 2), counts=(1,))


@given(st.lists(st.integers(1, 30000), min_size=1, max_size=50))
def test_answers_in_progress_are_length_biased(tokens: list[int]) -> None:
    lengths = Samples(tokens=tuple(tokens)).lengths()
    mean = sum(tokens) / len(tokens)
    assert lengths.mean == pytest.approx(mean)
    assert lengths.age_moment(1) >= mean / 2 * (1 - 1e-9)  # equality only if all are equally long
    assert 0 <= lengths.residual_quantile(0.5) <= lengths.residual_quantile(0.99) <= max(tokens)
    classes = lengths.classes(4)
    assert math.isclose(sum(share for share, _ in classes), 1)
    assert math.isclose(sum(share * length for share, length in classes), mean)


def test_a_workload_becomes_a_demand() -> None:
    demand = demand_of(Workload(prompts_per_step=4, group_size=2, max_new_tokens=16, max_staleness=3), minibatches=2)
    assert (demand.tokens_per_step, demand.gate_answers, demand.minibatches) == (128, 24, 2)
    with pytest.raises(UserError, match="staleness cannot be negative"):
        Demand(1, 1, -1, constant(1), constant(1), 2)


def test_what_is_left_of_an_answer_of_known_length_is_uniform() -> None:
    lengths = constant(100)
    assert [lengths.residual_quantile(share) for share in (0.25, 0.5, 0.99)] == pytest.approx([25, 50, 99])


@given(st.lists(st.integers(1, 50), min_size=1, max_size=5), st.integers(1, 3))
def test_the_mean_longest_is_that_of_all_draws(tokens: list[int], count: int) -> None:
    lengths = Lengths(tuple(float(t) for t in sorted(tokens)))
    draws = itertools.product(lengths.points, repeat=count)
    assert lengths.mean_longest(count) == pytest.approx(fmean(max(draw) for draw in draws))
