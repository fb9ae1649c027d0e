"""Errors of storage: which may pass by themselves, and how often something is tried."""

import errno
import socket

import aiohttp
import gcsfs.retry
import google.auth.exceptions
import jax
import pytest
import requests

from tokenformer_jax.errors import TransientError, UserError
from tokenformer_jax.storage import retry


def of_gcsfs(status, message='try later'):
  """What gcsfs raises for an answer of the server."""
  try:
    gcsfs.retry.validate_response(status, message, 'gs://bucket/runs/429/x')
  except Exception as error:
    return error
  raise AssertionError(status)


def of_tensorstore(name, **details):
  """What TensorStore raises; recorded from 0.1.86."""
  said = ''.join(f" [{key}='{value}']" for key, value in details.items())
  return ValueError(f'{name}: All 32 retry attempts failed: try later{said}')


def from_(outer, inner):
  outer.__cause__ = inner
  return outer


def os_error(name):
  return OSError(getattr(errno, name), 'said')


TRANSIENT = {
  'EIO': os_error('EIO'),
  'ESTALE': os_error('ESTALE'),
  'OSError of a status alone': OSError('503'),
  'asyncio': TimeoutError(),
  'name server': socket.gaierror(socket.EAI_AGAIN, 'Temporary failure in name resolution'),
  'gcsfs 429': of_gcsfs(429),
  'gcsfs 503': of_gcsfs(503, '{"error": {"code": 503, "message": "Backend Error"}}'),
  'gcsfs, md5': gcsfs.retry.ChecksumError(),
  'aiohttp, connection': aiohttp.ServerDisconnectedError(),
  'aiohttp, half an answer': aiohttp.ClientPayloadError('Response payload is not completed'),
  'aiohttp, status': aiohttp.ClientResponseError(None, (), status=503),
  'requests, connection': requests.exceptions.ConnectionError('Max retries exceeded'),
  'requests, timeout': requests.exceptions.ReadTimeout(),
  'requests, cut': requests.exceptions.ChunkedEncodingError(),
  'google.auth': google.auth.exceptions.TransportError('metadata server'),
  'TensorStore 503': of_tensorstore('ABORTED', http_response_code=503),
  'TensorStore 429': of_tensorstore('ABORTED', http_response_code=429),
  'TensorStore, connection': of_tensorstore('ABORTED', curl_code=52),
  'TensorStore, EIO': ValueError("UNKNOWN: Failed to read: x [os_error_code='5']"),
  'an older wording': ValueError('UNAVAILABLE: HTTP response code: 503 with body: x'),
  'deadline': ValueError('DEADLINE_EXCEEDED: request took longer'),
  'quota of requests': ValueError('RESOURCE_EXHAUSTED: quota of requests a minute'),
  'wrapped': from_(RuntimeError('save failed'), os_error('EIO')),
  'one of a group': ExceptionGroup('tasks', [KeyError('x'), os_error('ECONNRESET')]),
  'barrier of Orbax': TimeoutError('Timed out while waiting for async_write_complete barrier.'),
}
FOR_USER = {
  'full': os_error('ENOSPC'),
  'EACCES': os_error('EACCES'),
  'gcsfs 403': of_gcsfs(403),
  'TensorStore 403': of_tensorstore('PERMISSION_DENIED', http_response_code=403),
  'TensorStore, full': ValueError("RESOURCE_EXHAUSTED: Failed writing: x [os_error_code='28']"),
  'TensorStore, full, in words': ValueError('RESOURCE_EXHAUSTED: No space left on device'),
  'wrapped': from_(RuntimeError('save failed'), os_error('ENOSPC')),
}
CIRCLE = ValueError('one')
CIRCLE.__cause__ = from_(ValueError('other'), CIRCLE)
NEITHER = {
  'errors that cause each other': CIRCLE,
  'not there': FileNotFoundError('gs://bucket/runs/503/x'),
  'gcsfs 404': of_gcsfs(404),
  'gcsfs 400': of_gcsfs(400),
  'content': ValueError('zarr: invalid metadata'),
  'TensorStore, corrupt': ValueError('DATA_LOSS: Error reading "x": CRC-32C checksum mismatch'),
  'TensorStore, cut short': ValueError('FAILED_PRECONDITION: Expected 503 bytes'),
  'device memory': jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory'),
  'a bug': KeyError('x'),
}


@pytest.mark.parametrize(
  ('kind', 'name'),
  [
    *(('transient', name) for name in TRANSIENT),
    *(('for the user', name) for name in FOR_USER),
    *(('neither', name) for name in NEITHER),
  ],
)
def test_errors_pass_by_themselves_or_are_for_the_user_or_neither(kind, name):
  error = {'transient': TRANSIENT, 'for the user': FOR_USER, 'neither': NEITHER}[kind][name]
  assert retry.is_transient(error) == (kind == 'transient')
  assert retry.is_for_user(error) == (kind == 'for the user')


@pytest.fixture
def pauses(monkeypatch):
  """The pauses that were made, in place of making them."""
  made = []
  monkeypatch.setattr(retry.time, 'sleep', made.append)
  return made


def failing(errors):
  """A function that raises these one after the other, and then returns 7."""
  left = list(errors)

  def action():
    if left:
      raise left.pop(0)
    return 7

  return action


def test_pauses_grow_until_it_succeeds(pauses):
  assert retry.retried(failing([OSError('503')] * 3), 'reading x') == 7
  assert pauses == list(retry.PAUSES[:3]) and pauses == sorted(set(pauses)), 'pauses do not grow'


def test_after_the_last_pause_it_is_given_up_in_a_sentence(pauses):
  with pytest.raises(TransientError, match=r'^reading x failed 9 times \(OSError: 503\); '):
    retry.retried(failing([OSError('503')] * 99), 'reading x')
  assert pauses == list(retry.PAUSES), 'not every pause was made'


@pytest.mark.parametrize('error', [os_error('ENOSPC'), KeyError('x'), UserError('mistake')])
def test_other_errors_are_raised_at_once(pauses, error):
  with pytest.raises(type(error)):
    retry.retried(failing([error]), 'reading x')
  assert not pauses, 'time was lost over an error that does not pass'


def test_a_shortened_error_keeps_its_end():
  error = ValueError(f'writing {"a/long/path" * 50}: no space left\nand more')
  said = retry.one_line(error)
  assert said.startswith('ValueError: writing a/long') and said.endswith(': no space left')
  assert len(said) < 310, 'a sentence grows with the paths in it'
