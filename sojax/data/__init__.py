"""Text and tokens: what a model is trained and validated on."""

from sojax.data.text import SEPARATOR as SEPARATOR
from sojax.data.text import Corpus as Corpus
from sojax.data.text import load_corpus as load_corpus
from sojax.data.text import read_documents as read_documents
from sojax.data.text import split_documents as split_documents
from sojax.data.text import standard_library_files as standard_library_files
from sojax.data.tokens import Batch as Batch
from sojax.data.tokens import BatchSampler as BatchSampler
from sojax.data.tokens import decode as decode
from sojax.data.tokens import encode as encode
from sojax.data.tokens import validation_batches as validation_batches
