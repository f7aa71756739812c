# %% [markdown]
# # Which filter is a model on the HMM's plateau?
# Training on the published HMM stalls before it filters. A filter that sees only the last 1, 2 or 3 observations is
# exact too, for a shorter memory: the nearest one in bits says what the model has learnt by then.

# %%
import pandas as pd
import plotly.express as px

from interp import load_checkpoint
from interp.checkpoint import checkpoint_names, read_checkpoint
from interp.evaluate import predict
from interp.figures import write_figures
from interp.table import filter_distances
from interp.trajectory import snapshot_models
from probes.calibration import as_output, kl_bits

for name in ("hmm-transformer", "hmm-mamba"):
    model, task = load_checkpoint(name)
    batch = task.sample(512, seed=0)
    models = {**snapshot_models(name), "end": model}
    distances = {step: filter_distances([predict(m, batch).double()], batch, task) for step, m in models.items()}
    table = pd.DataFrame(distances).T.rename_axis("step")
    print(f"{name}: KL(filter || model) in bits")
    print(table.assign(nearest=table.idxmin(axis=1)).round(4).to_string())

# %% The learning curves of all models of the published HMM, above what those filters miss.
checkpoints = [checkpoint for name in checkpoint_names() if (checkpoint := read_checkpoint(name)).task == task]
curves = pd.DataFrame(
    [{"model": c.name, "step": line["step"], "KL bits": line["kl_bits"]} for c in checkpoints for line in c.log()]
)
figure = px.line(curves, x="step", y="KL bits", color="model", log_y=True, template="plotly_white", height=480)
for width, predictive in task.baselines(batch).items():
    missed = float(kl_bits(batch.posterior, as_output(predictive, task.readout)).mean())
    ends, line = [0, curves["step"].max()], {"dash": "dot", "color": "#888888"}
    figure.add_scatter(x=ends, y=[missed, missed], name=f"{width}: {missed:.2g} bits", mode="lines", line=line)
write_figures("plateau.html", [figure])
print("plateau.html written: open it in a browser")
