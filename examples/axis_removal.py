# %% [markdown]
# # Removing the entropy axis of a language model
# SULA prompts have an exact posterior. On some prompts, axes of SmolLM2's residual stream are fitted to its entropy; on
# others each is removed, beside random axes moved as far. What does it do to calibration, and to the local geometry of
# the layers above?

# %%
from dataclasses import replace

import pandas as pd
from transformer_lens.tools.analysis import SubspaceInterchange

from interp import load_pretrained
from interp.causal_battery import NAMES, causal_battery, causal_table, entropy_axes, layer_points
from interp.prompts import Sula
from probes import Edit, Subject, value_manifold
from probes.extract import at_position
from probes.interventions import placebos

LAYERS = (4, 14, 24)
model = load_pretrained("smollm2")
fit, batch = (Sula().sample(model.tokenizer, 48, seed) for seed in (1, 0))
subject = Subject(model, batch)

# %% Calibration: bits of KL(Bayes || model) that each axis and the belief frame cost, and what swaps redirect.
found = causal_battery(subject, fit, layers=LAYERS, placebos=2)
print(f"KL(Bayes || model) unedited: {subject.errors().mean():.3f} bits")
print(pd.DataFrame(causal_table(found)).to_string(index=False))

# %% Local geometry of the last layer, before and after an axis of layer 14 is removed.
LAYER = 14
site = "resid_post"
axes = entropy_axes(layer_points(Subject(model, fit), site)[LAYER], fit.posterior, fit.entropy)
before = subject.record(site)
source = at_position(before[site, LAYER], batch.position).mean(0, keepdim=True)
last = subject.hook(site, subject.n_layers - 1)
edits = {"before": []}
for name in NAMES[:3]:
    used = SubspaceInterchange(axes[name])
    edits[name] = [Edit(subject.hook(site, LAYER), used, source, batch.position)]
    for i, placebo in enumerate(placebos(used, 2, seed=0), 1):
        edits[f"random {i}, as far as the {name}"] = [Edit(subject.hook(site, LAYER), placebo, source, batch.position)]
lines = []
for name, edit in edits.items():
    acts = subject.record(site, edit)
    alone = replace(acts, cache={last: acts[last]})
    geometry = value_manifold(alone, batch.entropy, site=site, permutations=20)
    shown = {}
    for statistic in ("pc1_variance", "participation_ratio", "entropy_r2", "entropy_r2_within_position"):
        row = geometry.row(statistic, layer=0)
        shown[statistic] = f"{row['estimate']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
    lines.append({"removed": name, **shown})
print(pd.DataFrame(lines).to_string(index=False))
