"""The one glossary of axis names, used in annotations, tables and figures alike."""

AXES = {
    "batch": "sequence",
    "pos": "position in the sequence",
    "query": "supervised position (where an answer is due)",
    "query_pos": "position that attends",
    "key_pos": "position that is attended to",
    "layer": "layer",
    "head": "head",
    "d_model": "residual stream width",
    "d_head": "head width",
    "d_mlp": "feed-forward width",
    "d_in": "width of a real-valued input",
    "d_out": "class of the answer (or mean and variance)",
    "d_inner": "Mamba channel",
    "d_state": "Mamba state of a channel",
    "state": "latent state of the task",
    "feature": "coordinate of an activation",
    "point": "activation vector",
    "component": "principal component",
    "resample": "bootstrap resample",
    "draw": "uniform random draw",
    "half": "sequence of the held-out half",
}
"""Axis name -> what runs along it. TransformerLens's names where it has one."""
