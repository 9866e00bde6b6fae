"""Parameters that are sharded over ranks: every task of the papers is as on one rank."""

import pytest

from papers.tests.support.tasks import small_task
from tests.training.test_sharded_parameters import assert_ranks_use_models_as_often


@pytest.mark.slow
def test_ranks_with_fewer_rows_use_the_model_as_often(tmp_path):
    """Of every task, where neither the batch nor the examples held out divide by the ranks, all is as on one rank."""
    sections = {"vision": {"batch": 6}, "autoencoder": {"batch": 3}, "translation": {"batch": 5, "translations": 0}}
    assert_ranks_use_models_as_often([small_task(kind, tmp_path / kind, data=data) for kind, data in sections.items()])
