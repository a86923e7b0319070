"""Between the supervisor and the proxy: which instances get requests, and what the proxy sees of them."""

from __future__ import annotations

from collections.abc import Callable

from launcher.config.engine_arguments import lora_adapters
from launcher.config.schema import EngineKind
from launcher.daemon.deployment import Deployment
from launcher.engines.vllm import sampling_defaults
from launcher.instances.ports import InstanceDraining, InstanceEvent, InstanceGone, InstanceReady
from launcher.plan.plan import Placement
from launcher.proxy.server import ProxyServer


class InstanceTraffic:
    """The supervisor's view of the proxy (instances.ports.Traffic); applies its events to the proxy's upstreams."""

    def __init__(
        self,
        proxy: ProxyServer,
        deployment_of: Callable[[int], Deployment],
        placement_of: Callable[[int], Placement | None],
    ) -> None:
        """`deployment_of`, `placement_of`: of a slot."""
        self._proxy = proxy
        self._deployment_of = deployment_of
        self._placement_of = placement_of

    def apply(self, event: InstanceEvent) -> None:
        """An instance is ready, drains or is gone."""
        match event:
            case InstanceReady():
                self._add(event)
            case InstanceDraining():
                self._proxy.drain_upstream(event.slot, event.generation)
            case InstanceGone():
                self._proxy.remove_upstream(event.slot, event.generation, event.reason, crashed=event.crashed)

    def _add(self, event: InstanceReady) -> None:
        deployment = self._deployment_of(event.slot)
        config = deployment.config
        place = self._placement_of(event.slot)
        self._proxy.add_upstream(
            event.slot, event.generation, event.model, event.address, event.max_num_seqs,
            numa_node="" if place is None else str(place.membind),
            adapters=lora_adapters(config, event.model), ask_template=True,
            token_ids=config.engine.kind is EngineKind.VLLM,
            sampling_defaults=sampling_defaults(config, event.model),
            context_tokens=next(its.max_model_len for its in deployment.plan.models if its.name == event.model),
        )  # fmt: skip

    def in_flight(self, slot: int, generation: int) -> int:
        """Requests on an instance whose clients wait for it."""
        return self._proxy.awaited(slot, generation)

    def relayed(self, slot: int, generation: int) -> int:
        return self._proxy.progress(slot, generation)

    def silent(self, slot: int, generation: int) -> bool:
        """An instance's requests got no answers for long, and it is below its concurrency limit."""
        return self._proxy.silent(slot, generation)
