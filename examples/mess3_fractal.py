# %% [markdown]
# # The fractal of Mess3 in a residual stream (Shai et al. 2024)
# Beliefs about a Mess3 process form a fractal in the simplex of its three states. A transformer that only predicts
# symbols holds them linearly; how much better than the last three observations do, the table says.

# %%
from interp import load_checkpoint
from interp.figures import write_figures
from probes import belief_geometry, extract

model, task = load_checkpoint("mess3-transformer")
batch = task.sample(2000, seed=0)
found = belief_geometry(extract(model, batch, ["belief"]), batch.belief, batch.tokens)
columns = ["layer", "statistic", "estimate", "low", "high", *found.nulls()]
print(found.frame[columns].round(4).to_string(index=False))

# %%
write_figures("mess3.html", [found.simplex()])
print("mess3.html written: open it in a browser")
