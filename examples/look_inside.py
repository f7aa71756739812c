# %% [markdown]
# # Look inside a transformer that does Bayesian elimination
# The shipped checkpoint was trained on bijections of 20 keys onto 20 values. Its exact posterior is known at every
# position, so every number below stands beside the truth, and beside the same network before training.

# %%
import pandas as pd

from interp import load_checkpoint
from probes import calibration, extract, key_orthogonality, query_key_sharpening, value_manifold

pd.set_option("display.width", 200, "display.max_columns", 12)
model, task = load_checkpoint("bijection-transformer")

# %% Half of these sequences repeat keys, so that entropy varies within a position.
batch = task.replace(repeats=0.5).sample(256, seed=0)
acts = extract(model, batch)

# %% Is it calibrated, sequence by sequence?
found = calibration(acts.logits, batch.posterior, batch.targets, twin=acts.twin.logits)
print(found.to_frame().query("query.isna()").drop(columns="query").to_string(index=False))

# %% Are keys of distinct hypotheses orthogonal? Compare `estimate` with `null_random` and `null_init`.
print(key_orthogonality(acts, batch.hypothesis).to_frame().query("statistic == 'mean_abs_cos'").to_string(index=False))

# %% Where is the evidence read?
print(query_key_sharpening(acts, batch.evidence).to_frame().query("statistic == 'mass'").to_string(index=False))

# %% Does the value manifold follow entropy, or only position?
for site in ("v", "resid_post"):
    manifold = value_manifold(acts, batch.entropy, batch.position, site=site)
    print(site)
    print(manifold.summary().to_string())

# %% Turn it around: `manifold.scatter().show()` and `found.figure().show()` open interactive plots.
