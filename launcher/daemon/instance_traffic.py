"""Between the supervisor and the proxy: which instances get requests, and what the proxy sees of them."""

from __future__ import annotations

from collections.abc import Callable

from launcher.daemon.deployment import Deployment
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
        model = next(its for its in deployment.config.models if its.name == event.model)
        traits = deployment.engine.traits(model)
        place = self._placement_of(event.slot)
        self._proxy.add_upstream(
            event.slot, event.generation, event.model, event.address, event.max_num_seqs,
            numa_node="" if place is None else str(place.membind),
            adapters=traits.adapters, ask_template=True, token_ids=traits.token_ids,
            sampling_defaults=traits.sampling_defaults,
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
