# %% [markdown]
# # Does a Mamba's state hold the belief of a hidden Markov model?
# Regression from the recurrent state of every layer to the exact belief, beside the last one, two and three
# observations, exact filters of the same windows, shuffled beliefs and the untrained model; k-means clusters of the
# state beside those of the observed symbol.

# %%
import sys

from interp import load_checkpoint
from interp.diagnose import beliefs
from probes import extract

for name in sys.argv[1:] or ["hmm-sticky-mamba", "hmm-sticky-lstm", "hmm-sticky-transformer"]:
    model, task = load_checkpoint(name)
    batch = task.sample(192, seed=0)
    found = beliefs(extract(model, batch, ["belief"]), batch, task.baselines(batch), site="belief")
    print(name)
    print(found.frame.drop(columns="effect").dropna(axis=1, how="all").round(4).to_string(index=False))
