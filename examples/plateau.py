# %% [markdown]
# # Which filter is a model on the HMM's plateau?
# Training on the published HMM stalls before it filters. A filter that sees only the last 1, 2 or 3 observations is
# exact too, for a shorter memory: the nearest one in bits says what the model has learnt by then.

# %%
import sys

import pandas as pd

from interp import load_checkpoint
from interp.evaluate import predict
from interp.table import filter_distances
from interp.trajectory import snapshot_models

names = sys.argv[1:] or ["hmm-transformer", "hmm-mamba"]
for name in names:
    model, task = load_checkpoint(name)
    batch = task.sample(512, seed=0)
    models = {**snapshot_models(name), "end": model}
    distances = {
        step: filter_distances([predict(model, batch).double()], batch, task) for step, model in models.items()
    }
    table = pd.DataFrame(distances).T.rename_axis("step")
    print(f"{name}: KL(filter || model) in bits")
    print(table.assign(nearest=table.idxmin(axis=1)).round(4).to_string())
