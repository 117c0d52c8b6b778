"""Values of the document's formats, for schemathesis: tokens of every vocabulary of the trial."""

import schemathesis
from hypothesis import strategies

from bertsmith.serving.http.schemas import VOCABULARY_FORMAT

schemathesis.openapi.format(VOCABULARY_FORMAT, strategies.sampled_from(["the", "no", "[UNK]"]))
