-- From reStructuredText to what a notebook's Markdown cell shows, for sphinx-gallery's pandoc.

-- :class:`~torchrl.data.ReplayBuffer` reads as `ReplayBuffer`.
function Code(code)
  local name = code.text:match("^~.*%.([^.]+)$") or code.text:match("^~(.+)$") or code.text
  return pandoc.Code(name)
end
