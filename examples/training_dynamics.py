# %% [markdown]
# # What comes first in training: the frame or the precision?
# Every probe at every snapshot, on the same sequences. The dissociation is a number: the step at which attention
# patterns, and the values they fetch, have come 90 % of the way to where they end.

# %%
import sys

from interp.dynamics import dynamics
from interp.figures import write_figures

names = sys.argv[1:] or ["bijection-transformer", "hmm-mamba"]
pages = []
for name in names:
    found = dynamics(name)
    pages += [found.figure(), found.animation()]
    table = found.to_frame().pivot_table("estimate", "step", ["statistic", "layer"], dropna=False)
    print(name, "calibration (bits)")
    calibration = found.to_frame().query("statistic == 'kl_bits'")
    print(calibration[["step", "estimate"]].round(5).to_string(index=False))
    print(table.drop(columns="kl_bits", errors="ignore").dropna(axis=1, how="all").round(3).to_string())
    if found.dissociation is not None:
        columns = ["attention", "values", "values_relative", "lag_values_relative"]
        print("steps to 90 %, and doublings by which values come after attention")
        print(found.dissociation.summary()[columns].to_string())

# %%
write_figures("dynamics.html", pages)
print("dynamics.html written: open it in a browser")
