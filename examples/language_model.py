# %% [markdown]
# # Does a pretrained language model do Bayes, and do its values show it?
# SULA prompts name things with two nonsense labels, of which one in ten is wrong: the posterior of the next label is
# exact. The probes are those of the wind tunnels, on the model's own keys and values.

# %%
import sys

from interp import load_pretrained
from interp.language import record
from interp.prompts import Sula
from probes import calibration, key_orthogonality, query_key_sharpening, value_manifold

model = load_pretrained(sys.argv[1] if len(sys.argv) > 1 else "smollm2")  # a hub id, a folder, a GGUF file
batch = Sula().sample(model.tokenizer, 64, seed=0)
print(batch.text[0])

# %% Activations at every layer, and those of the same architecture before training.
acts = record(model, model.reinitialized(0), batch, ["k", "v", "scores", "pattern"])

# %% Is the answer, renormalised over the two labels, calibrated? `null_uniform` has not read the prompt.
output, untrained = batch.answer_logits(acts.logits), batch.answer_logits(acts.twin.logits)
found = calibration(output, batch.posterior, batch.targets, baselines=batch.baselines, twin=untrained)
print(found.to_frame().query("query.isna()").drop(columns="query").to_string(index=False))

# %% Keys of distinct hypotheses, and attention on the evidence: the mean over the heads of a layer.
for result, statistic in (
    (key_orthogonality(acts, batch.hypothesis), "mean_abs_cos"),
    (query_key_sharpening(acts, batch.evidence), "mass"),
):
    frame = result.overall(statistic)
    print(statistic, frame.groupby("layer")[["estimate", *result.nulls()]].mean().dropna(axis=1).round(3).to_string())

# %% The value manifold against the exact entropy: `entropy_r2_within_position` is what position does not explain.
manifold = value_manifold(acts, batch.entropy, batch.position)
print(manifold.summary().to_string())

# %% Turn it around: `manifold.scatter().show()`. `windtunnel compare bijection-transformer smollm2` runs all probes.
