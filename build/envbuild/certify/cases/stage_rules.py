"""The rules of how layers are dealt to pipeline stages, as megatron-core's TransformerConfig has them."""

from __future__ import annotations

from collections.abc import Iterator

from envbuild.certify.cases.case import ResolvedRow


def stage_sizes(row: ResolvedRow) -> Iterator[str]:
    """That every stage, and each of its virtual ones, has whole layers, and all layers are dealt out."""
    layout, layers = row.case.layout, row.model.num_layers
    stages = layout.pipeline * layout.virtual_pipeline
    ends = {name: getattr(layout, name) for name in _ENDS if getattr(layout, name) is not None}
    counted = sum(getattr(layout, name) for name in _COUNTED)
    written = layout.pipeline_model_parallel_layout
    if (ends or counted or written) and layout.pipeline == 1:
        yield f"{next(iter([*ends, *_COUNTED] if not written else [_WRITTEN]))} needs pipeline > 1"
        return
    if (written is not None) + bool(ends) + bool(counted) > 1:
        yield f"of {_WRITTEN}, {_ENDS[0]} (or last) and {_COUNTED[0]} (or loss) a layout has one kind"
    elif written is not None:
        if written.count("|") + 1 != stages or written.count("t") != layers:
            yield (
                f"{_WRITTEN} has {written.count('|') + 1} stages of {written.count('t')} layers in all; it must have "
                f"pipeline x virtual_pipeline = {stages} of num_layers {layers}"
            )
    elif ends:
        inner, of_inner = layout.pipeline - len(ends), layers - sum(ends.values())
        uneven = [name for name, size in ends.items() if size % layout.virtual_pipeline]
        if uneven:
            yield f"{uneven[0]} must be a multiple of virtual_pipeline = {layout.virtual_pipeline}"
        if of_inner < 0 or (inner == 0 and of_inner) or (inner and of_inner % (inner * layout.virtual_pipeline)):
            yield f"num_layers {layers} without {' and '.join(ends)} does not divide by the {inner} other stages"
    elif (layers + counted) % stages:
        also = f" and {counted} that count as layers" if counted else ""
        allowed = [str(size) for size in range(1, layers + counted + 1) if (layers + counted) % size == 0]
        yield (
            f"num_layers {layers}{also} must be a multiple of pipeline x virtual_pipeline = {stages} "
            f"(allowed: {', '.join(allowed)})"
        )


_ENDS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
_COUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
_WRITTEN = "pipeline_model_parallel_layout"
