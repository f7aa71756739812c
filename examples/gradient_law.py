# %% [markdown]
# # Does attention follow its gradient, and does it settle before values do?
# Paper II derives the gradient of a head, dL/ds = alpha (b - E_alpha[b]), and tells a story about training from it:
# attention follows the advantage, settles first, and values refine afterwards. The law is exact; the story is measured
# here on a shipped checkpoint, its snapshots, and one step of three optimisers. The snapshots are of one run.

# %%
import pandas as pd
import torch

from interp import TrainConfig, load_checkpoint
from interp.recipe import make_optimizers
from interp.trajectory import snapshot_models, step_response
from probes import advantage, extract, extract_gradients, responsibilities, settling

torch.set_num_threads(1)
pd.set_option("display.width", 200, "display.max_columns", 12)
name = "bijection-transformer"
model, task = load_checkpoint(name)
batch = task.for_training().sample(64, seed=0)
models = snapshot_models(name)

# %% The law holds on every head, to rounding; without its baseline it does not.
law = advantage(extract_gradients(model, batch), resamples=100).frame
law = law[law["statistic"] == "law_residual"]
worst, without = law["estimate"].max(), law["null_no_baseline"].min()
print(f"residual of {len(law)} heads at most {worst:.1e}, without the baseline at least {without:.1e}")

# %% Do heads divide the sources among them, and do values move against the errors of those who use them?
steps = list(models)
for step, later in zip(steps[2::3], steps[3::3], strict=False):
    after = extract(models[later], batch, ["v"], twin_seed=None)
    found = responsibilities(extract_gradients(models[step], batch, twin_seed=None), after, resamples=0).frame
    mean = found.groupby("statistic")[["estimate", "null_uniform", "null_permutation"]].mean()
    print(
        f"step {step:>5}: specialisation {mean.estimate.specialisation:.2f} bits (uniform attention "
        f"{mean.null_uniform.specialisation:.2f}), prototype alignment until step {later} "
        f"{mean.estimate.prototype_alignment:.3f} (permuted {mean.null_permutation.prototype_alignment:.3f})"
    )

# %% Does one step move attention as the advantage predicts, and the loss as the gradient of the weights does?
optimizers = {
    "SGD, 0.1": lambda m: [torch.optim.SGD(m.parameters(), lr=0.1)],
    "AdamW, 2e-3": lambda m: make_optimizers(m, TrainConfig(optimizer="adamw", lr=2e-3)),
    "AdamW, 2e-5": lambda m: make_optimizers(m, TrainConfig(optimizer="adamw", lr=2e-5)),
    "Muon, 0.012": lambda m: make_optimizers(m, TrainConfig(muon_lr=0.012, lr=2e-3)),
    "Muon, 0.00012": lambda m: make_optimizers(m, TrainConfig(muon_lr=1.2e-4, lr=2e-5)),
}
lines = []
for step in (steps[0], steps[len(steps) // 2], steps[-1]):
    for label, make in optimizers.items():
        result = step_response(models[step], batch, make, 1.0, resamples=0)
        correlation = result.frame.query("statistic == 'attention_correlation'")["estimate"]
        line = {"step": step, "optimiser": label, "attention_correlation, median head": round(correlation.median(), 3)}
        line |= {key: f"{result.value(key):.2g}" for key in ("loss_change", "linear_loss_change")}
        lines.append(line)
print(pd.DataFrame(lines).to_string(index=False))

# %% Which settles first? Positive lags, in doublings of training time: attention.
records = {step: extract(m, batch, ["pattern", "v"], twin_seed=None) for step, m in models.items()}
print(settling(records).summary()[["attention", "values_relative", "lag_values_relative"]].to_string())
