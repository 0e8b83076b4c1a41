import pytest
from support.decoding import shared_model
from transformers import PreTrainedModel


@pytest.fixture
def qwen() -> PreTrainedModel:
    return shared_model("qwen3_moe")
