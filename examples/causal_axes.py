# %% [markdown]
# # Decodable is not used: the entropy axis and the belief frame, put to the test
# Posterior entropy can be read off the residual stream along one axis. Does the model read it there? Each subspace is
# fitted on some sequences; on others it is ablated, swapped between sequences and pushed, beside random subspaces of
# the same dimension moved as far, subspaces fitted to shuffled beliefs, wrong states, and means.

# %%
import pandas as pd

from interp import load_checkpoint
from interp.causal_battery import causal_battery, causal_table
from interp.figures import write_figures
from probes import Subject, head_ablation, head_removal
from probes.plotting import heat_map

model, task = load_checkpoint("bijection-transformer")
task = task.for_training()
fit, batch = task.sample(256, seed=1), task.sample(64, seed=0)
subject = Subject(model, batch)

# %% Which layers use which subspace?
found = causal_battery(subject, fit, per_position=True)
print(pd.DataFrame(causal_table(found)).to_string(index=False))

# %% Which heads carry the posterior, and how many can go?
print(head_ablation(subject, by="resample").summary().to_string())
print(head_removal(subject).frame[["removed", "layer", "head", "estimate", "low", "high"]].to_string(index=False))

# %% Where in the sequence? Swapping the frame at one position redirects that answer.
figures = [
    heat_map(found["swap, belief frame"], "redirected_bits"),
    heat_map(found["ablation, belief frame"], "kl_increase_bits"),
    heat_map(found["ablation, decoded entropy axis"], "kl_increase_bits"),
]
write_figures("causal.html", figures)
print("causal.html written: open it in a browser")
