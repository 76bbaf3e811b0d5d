"""What the model's own code says against a run, on a build without memory: before an engine, or at a desk.

Torch is imported only when it is asked.
"""

from ds_pretrain.config.plan import Plan
from ds_pretrain.core.errors import InputError
from ds_pretrain.models.pretrained import Base
from ds_pretrain.training.curriculum import phase_models


def rehearsal_problems(plan: Plan, base: Base | None) -> list[str]:
    """Why the model cannot be built, or cannot take the weights of `model.from`. Needs torch."""
    from ds_pretrain.models.build import rehearse_build
    from ds_pretrain.models.rope_live import rehearse_rope

    try:
        rehearse_build(
            plan.model_text,
            qk_norm=plan.run.model.qk_norm,
            attention=plan.run.model.attention,
            name=plan.run.model.config,
            base=base,
            recompute=plan.run.model.recompute or any(phase.recompute for phase in plan.run.phases),
        )
        for phase, model in phase_models(plan).items():
            if model != plan.model:
                rehearse_rope(model, f"{plan.run_path}: phases.{phase}")
    except InputError as error:
        return list(error.problems)
    return []


def base_findings(plan: Plan, base: Base | None) -> tuple[list[str], str | None]:
    """How the weights of `model.from` go with the model: what is wrong, and what was looked at, in a line."""
    if base is None:
        return [], None
    try:
        problems = rehearsal_problems(plan, base)
    except (ImportError, OSError) as error:
        return [], (
            f"warning    the tensors of {base.folder} were not compared with the model, which takes "
            f"torch and transformers ({error}); train compares them before it opens an engine"
        )
    return problems, (
        f"weights    {base.folder}: names and shapes of {len(base.tensors):,} tensors are those of "
        f"the model (fingerprint {base.fingerprint})"
    )
