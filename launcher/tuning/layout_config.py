"""A configuration with a candidate's layout. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from launcher.config.schema import Config
from launcher.tuning.model import Layout


def with_layout(config: Config, layout: Layout) -> Config:
    """`layout.stack` is not part of it: it is a matter of the engine's environment."""
    limits = {
        key: value
        for key in ("max_num_seqs", "max_num_batched_tokens")
        if (value := getattr(layout, key)) is not None
    }
    return replace(
        config,
        models=tuple(replace(model, **limits) for model in config.models),
        layout=replace(
            config.layout, strategy=layout.strategy, instances_per_socket=layout.instances_per_socket,
            reserve_cores=layout.reserve_cores, span_nodes=layout.span_nodes,
        ),
    )  # fmt: skip
