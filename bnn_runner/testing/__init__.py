"""Contract checks that a package outside calls in its own tests; pytest is not needed.

Each check takes an instance and raises `AssertionError` with a sentence on the first line of the contract that does
not hold (DESIGN of the contracts: `bnn_runner.base`, `bnn_runner.tasks`, `bnn_runner.scoring`).

>>> from bnn_runner.methods.map import MAP
>>> from bnn_runner.models.mlp import MLP
>>> from bnn_runner.testing import check_method, check_model
>>> check_method(MAP())
>>> check_model(MLP(hidden=(8,)))

In the tests of a package `mine` whose choices lie in `mine/conf`:

    from bnn_runner.testing import check_choice, check_method

    def test_my_method() -> None:
        check_method(check_choice("mine/conf", "method", "mymethod", allow=["mine"]))

`check_choice` looks at the YAML file and builds its object; `check_method`, `check_model`, `check_data`,
`check_metric` and `check_rule` check the object. `testing.problems` has the small tasks and networks that they use.
"""

from bnn_runner.testing.choices import check_choice
from bnn_runner.testing.data import check_data
from bnn_runner.testing.methods import check_method
from bnn_runner.testing.metrics import check_metric
from bnn_runner.testing.models import check_model
from bnn_runner.testing.rules import check_rule

__all__ = ["check_choice", "check_data", "check_method", "check_metric", "check_model", "check_rule"]
