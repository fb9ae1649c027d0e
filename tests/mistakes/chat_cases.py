"""Wrong conversations and templates, and what is said about them; see `cases`."""

_CHAT = 'train {tiny} --config.data.rows=chat --config.data.source=files:{in}/chat'

CHATS = {
  f'{_CHAT}/no_role.jsonl': (
    '{in}/chat/no_role.jsonl, line 1, message 1 has no role; role must be text'
  ),
  f'{_CHAT}/text.jsonl': (
    '{in}/chat/text.jsonl, line 1, is no conversation (config.data.rows=chat): it needs messages'
  ),
  f'{_CHAT}/cat.jsonl': (
    "{in}/chat/cat.jsonl, line 1, message 1 is from 'cat'; it must be from one of human, gpt"
  ),
  'train {tiny} --config.data.packing=best_fit': (
    "config.data.packing is 'best_fit', which has no effect with data.rows=text"
  ),
  f'{_CHAT}/good.jsonl --config.data.packing=best_fit --config.data.sequence_length=32 '
  "--config.data.sequence_length_by_step='0:16 9:32'": (
    'and config.data.packing=best_fit fills sequences of one length; leave out one of them'
  ),
  f'{_CHAT}/empty.jsonl': (
    "{in}/chat/empty.jsonl, line 1, has an empty answer (' '); leave the row out"
  ),
  'train {tiny} --config.data.source=files:{in}/chat/question.jsonl': (
    "{in}/chat/question.jsonl, line 1, has no field 'text' (config.data.text_field); for "
    'conversations set config.data.rows=chat'
  ),
  f'{_CHAT}/good.jsonl --config.data.text_field=response': (
    "config.data.text_field is 'response', which has no effect with data.rows=chat"
  ),
  f'{_CHAT}/good.jsonl --config.data.chat_template={{in}}/chat/name.jinja': (
    "name.jinja: it writes a value that is not there ('dict object' has no attribute 'contents')"
  ),
  f'{_CHAT}/good.jsonl --config.data.chat_template={{in}}/chat/no_prompt.jinja': (
    "chat/no_prompt.jinja writes '<|assistant|>' before an answer, which is neither learned nor"
  ),
  'train {tiny} --config.data.rows=chat --config.data.source=files:{in}/some/a.txt': (
    '{in}/some/a.txt is one text, and config.data.rows=chat needs rows'
  ),
  'train {tiny} --config.data.rows=chat --config.data.source=stdlib': (
    'config.data.source is stdlib, which has no rows of chat'
  ),
  f'{_CHAT}/good.jsonl --config.data.chat_template={{in}}/chat/plain.jinja': (
    'chat/plain.jinja does not say what the model has to learn; put {% generation %} before'
  ),
  f'{_CHAT}/good.jsonl --config.data.chat_template={{in}}/chat/cut.jinja': (
    'chat/cut.jinja is not a valid Jinja template (line 1: '
  ),
  f'{_CHAT}/good.jsonl --config.data.chat_template=none.jinja': (
    'config.data.chat_template=none.jinja cannot be read (No such file or directory)'
  ),
  'train {tiny} --config.data.chat_template=none.jinja': (
    "config.data.chat_template is 'none.jinja', which has no effect with data.rows=text"
  ),
}
