"""Log-probabilities of answers are numbers that JSON has."""

import json
import math

from hfpaged.serving.api.scored_tokens import json_logprob


def test_a_token_that_cannot_be_is_a_number_in_json():
    assert json.loads(json.dumps(json_logprob(-math.inf), allow_nan=False)) == -9999.0


def test_others_are_as_they_are():
    assert json_logprob(-0.25) == -0.25
