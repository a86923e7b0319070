"""The host's load in the names and the form that endpoint pickers read."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from launcher.proxy.pages.host_load import HostView, render


def families(view: HostView) -> dict[str, list[tuple[dict[str, str], float]]]:
    found = list(text_string_to_metric_families(render(view, 1700000000.5)))
    assert {family.type for family in found} == {"gauge"}  # of other types the endpoint picker reads 0
    return {family.name: [(sample.labels, sample.value) for sample in family.samples] for family in found}


def test_each_family_has_one_series() -> None:
    assert families(HostView(3, 4, 0.5)) == {
        "vllm:num_requests_waiting": [({}, 4)],
        "vllm:num_requests_running": [({}, 3)],
        "vllm:kv_cache_usage_perc": [({}, 0.5)],
        "vllm:lora_requests_info": [
            ({"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}, 1700000000.5)
        ],
    }


def test_adapters_are_lists_without_spaces() -> None:
    view = HostView(0, 0, 0.0, 4, ("sql", 'o"d\\d\n'), ("law",))
    ((labels, _),) = families(view)["vllm:lora_requests_info"]
    assert labels == {
        "max_lora": "4",
        "running_lora_adapters": 'sql,o"d\\d\n',
        "waiting_lora_adapters": "law",
    }
