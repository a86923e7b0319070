"""A tensor of a checkpoint, from file headers. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tensor:
    name: str
    elements: int
    stored_bytes: int
    dimensions: int
    floating: bool
    """Converted to the engine's type when it is loaded; packed (quantized) tensors stay as they are."""

    def loaded_bytes(self, element_bytes: int) -> int:
        return self.elements * element_bytes if self.floating else self.stored_bytes

    @property
    def is_head(self) -> bool:
        """The output projection; with tied weights it is the embedding."""
        return self.name.endswith(("lm_head.weight", "output.weight")) and ".layers." not in self.name

    @property
    def is_embedding(self) -> bool:
        ends = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "token_embd.weight")
        return self.name.endswith(ends)

    @property
    def is_replicated(self) -> bool:
        """Held whole by every tensor-parallel rank: norms and biases, and latent attention's narrow projections
        (vllm/model_executor/models/deepseek_v2.py: ReplicatedLinear)."""
        return self.dimensions <= 1 or any(word in self.name for word in _REPLICATED)


_REPLICATED = ("kv_a_proj", "q_a_proj", ".gate.weight", "router")
