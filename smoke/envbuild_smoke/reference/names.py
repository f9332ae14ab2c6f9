"""Names of weights in Megatron's modules, as the reference has them.

Transformer Engine's layers hold the norm before a linear layer themselves, and the experts of a layer together.
"""

import re

_RENAMED = (
    (r"\.self_attention\.linear_qkv\.layer_norm_(weight|bias)$", r".input_layernorm.\1"),
    (r"\.mlp\.linear_fc1\.layer_norm_(weight|bias)$", r".pre_mlp_layernorm.\1"),
    (r"\.mixer\.in_proj\.layer_norm_(weight|bias)$", r".norm.\1"),
    # megatron-core 0.19 holds the convolution's parameters without a module.
    (r"\.mixer\.conv1d_(weight|bias)$", r".mixer.conv1d.\1"),
    (r"\.experts\.(linear_fc[12])\.weight(\d+)$", r".experts.local_experts.\2.\1.weight"),
    # megatron-core 0.17 and later.
    (r"^(mtp\.layers\.\d+)\.mtp_model_layer\.", r"\1.transformer_layer."),
    (r"^decoder\.final_norm(\.|$)", r"decoder.final_layernorm\1"),
)


def reference_name(name: str) -> str:
    """Return the name that a weight or a module has in the reference."""
    # Wrappers for a number format or for data parallelism hold the model under this name.
    while name.startswith("module."):
        name = name.removeprefix("module.")
    for pattern, replacement in _RENAMED:
        name = re.sub(pattern, replacement, name)
    return name
