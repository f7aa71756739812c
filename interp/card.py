"""The model card that lies in every checkpoint folder, in the Hugging Face hub's form."""

from __future__ import annotations

import json
from typing import Any

import jinja2

TEMPLATE = jinja2.Template(
    """\
---
license: mit
library_name: windtunnel
tags: [interpretability, bayesian-wind-tunnel, {{ task.name }}, {{ model.architecture }}]
---
# {{ name }}

A {{ model.architecture }} trained on the Bayesian wind tunnel `{{ task.name }}`, whose exact posterior is known.

```python
from interp import load_checkpoint, diagnose

model, task = load_checkpoint("{{ name }}")
diagnose(model, task).to_html("report.html")
```

| measured on {{ metrics.get("sequences", "-") }} held-out sequences | value |
|---|---|
{% for key, value in metrics.items() if key != "sequences" -%}
| {{ key }} | {{ value if value is string else value | tojson }} |
{% endfor %}
How it was trained: `{{ training.command }}`{% if training.seconds %} \
({{ "%.0f" | format(training.seconds) }} s, status: {{ training.status }}){% endif %}.

| part | settings |
|---|---|
| task | `{{ task | tojson }}` |
| model | `{{ model | tojson }}` |
| training | `{{ training | tojson }}` |
| versions | `{{ versions | tojson }}` |
""",
    keep_trailing_newline=True,
)


def model_card(name: str, config: dict[str, Any]) -> str:
    """The card of a checkpoint from the content of its ``config.json``."""
    plain = json.loads(json.dumps(config))
    plain["metrics"] = _flat(plain["metrics"])
    plain["training"].setdefault("command", "not recorded")
    return TEMPLATE.render(name=name, **plain)


def _flat(metrics: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in metrics.items():
        if key == "baselines":
            continue
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}: ")
        elif isinstance(value, list):
            flat[prefix + key] = " to ".join(f"{item:.3g}" for item in value)
        else:
            flat[prefix + key] = f"{value:.3g}" if isinstance(value, float) else value
    return flat
