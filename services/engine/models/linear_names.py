"""The linear layers of all families by the names of their weights. Nothing here needs torch."""

# And their experts. Norms, biases, routers, embeddings, the output layer, latents and what expands them are not among
# them: errors there reach every token, or a choice, and most are small.
_LAYERS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.qkv_proj", "self_attn.o_proj",
    "self_attn.out_proj", "self_attn.q_a_proj", "self_attn.q_b_proj", "gate_proj", "up_proj", "gate_up_proj",
    "down_proj", ".fc1", ".fc2", ".w1", ".w2", ".w3",
)  # fmt: skip


_OF_ALL_EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")  # [experts, in, out]


def is_of_all_experts(name: str) -> bool:
    """Returns True for a tensor that has a weight of each expert of a layer, [experts, in, out]."""
    return name.endswith(_OF_ALL_EXPERTS)


def is_linear(name: str) -> bool:
    """Returns True for the weight of a linear layer within the layers of a model."""
    return name.removesuffix(".weight").endswith(_LAYERS) and name.endswith(".weight")
