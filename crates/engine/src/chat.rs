//! Chats as text. In: the template of a model file and messages; out: the text that the model was trained to see, in
//! which no message can be read as a special token.
//! NOT here: tokens (tokenizer.rs), how messages are kept apart from the template's own tokens (specials.rs).

use crate::Error;
use crate::folder::Folder;
use crate::gguf::Gguf;
use crate::specials::{Rendered, Specials};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, ErrorKind, Value, context};

/// One message of a chat.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// `system`, `user` or `assistant`.
    pub role: String,
    /// What was said.
    pub content: String,
}

impl Message {
    /// A message of the user.
    pub fn user(content: impl Into<String>) -> Self {
        Self { role: "user".into(), content: content.into() }
    }
}

/// The chat template of a model file.
pub struct ChatTemplate {
    environment: Environment<'static>,
    start: String,
    end: String,
}

const NAME: &str = "chat";

impl ChatTemplate {
    /// The template of a GGUF file, if it has one.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] for a template that does not parse.
    pub fn of_gguf(gguf: &Gguf) -> Result<Option<Self>, Error> {
        let Some(source) = gguf.text("tokenizer.chat_template")? else { return Ok(None) };
        let spelled = |key: &str| -> Result<String, Error> {
            use candle_core::quantized::gguf_file::Value;
            let Some(id) = gguf.count(key)? else { return Ok(String::new()) };
            match gguf.get("tokenizer.ggml.tokens") {
                Some(Value::Array(tokens)) => match tokens.get(id) {
                    Some(Value::String(text)) => Ok(text.clone()),
                    _ => Ok(String::new()),
                },
                _ => Ok(String::new()),
            }
        };
        Self::new(source, spelled("tokenizer.ggml.bos_token_id")?, spelled("tokenizer.ggml.eos_token_id")?).map(Some)
    }

    /// The template of a folder, if it has one: chat_template.jinja, or an entry of tokenizer_config.json.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] for a template that does not parse; those of reading.
    pub fn of_folder(folder: &Folder) -> Result<Option<Self>, Error> {
        use serde_json::Value;
        let why = |why: &str| Error::ChatTemplate { why: why.into() };
        let config = folder.json("tokenizer_config.json")?.unwrap_or_default();
        let source = match (folder.bytes("chat_template.jinja")?, config.get("chat_template")) {
            (Some(bytes), _) => String::from_utf8(bytes).map_err(|_| why("chat_template.jinja is no UTF-8"))?,
            (None, None | Some(Value::Null)) => return Ok(None),
            (None, Some(Value::String(source))) => source.clone(),
            // Several by name: the one for plain chats.
            (None, Some(Value::Array(named))) => {
                let default = named.iter().find(|t| t.get("name").and_then(Value::as_str) == Some("default"));
                let source = default.and_then(|t| t.get("template")?.as_str());
                source.ok_or_else(|| why("tokenizer_config.json has templates, none of them `default`"))?.to_owned()
            }
            (None, Some(_)) => return Err(why("`chat_template` of tokenizer_config.json is no text")),
        };
        let spelled = |key: &str| match config.get(key) {
            Some(Value::String(text)) => text.clone(),
            Some(Value::Object(token)) => token.get("content").and_then(Value::as_str).unwrap_or_default().to_owned(),
            _ => String::new(),
        };
        Self::new(&source, spelled("bos_token"), spelled("eos_token")).map(Some)
    }

    /// A template from its source, with the texts of the start and end tokens.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] for a template that does not parse.
    pub fn new(source: &str, start: String, end: String) -> Result<Self, Error> {
        let mut environment = Environment::new();
        // Templates are written for a renderer with these two settings and Python's string methods.
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(failed)?;
        environment.set_syntax(syntax);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |why: String| -> Result<String, minijinja::Error> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, why))
        });
        environment.add_template_owned(NAME, source.to_owned()).map_err(failed)?;
        Ok(Self { environment, start, end })
    }

    /// The text of a chat, ending where the assistant's answer begins. What messages say is data: none of `specials`
    /// is read from it.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] when the template fails, or refuses the messages.
    pub fn render(&self, messages: &[Message], specials: &Specials) -> Result<Rendered, Error> {
        let template = self.environment.get_template(NAME).map_err(failed)?;
        let said = messages.iter().flat_map(|m| [m.role.as_str(), m.content.as_str()]);
        let guard = specials.guard_for(said.chain([template.source()]))?;
        let messages: Vec<Value> = messages
            .iter()
            .map(|m| [("role", &m.role), ("content", &m.content)].map(|(k, v)| (k, specials.guarded(v, guard))))
            .map(Value::from_pairs)
            .collect();
        let text = template
            .render(context! {
                messages => messages,
                add_generation_prompt => true,
                bos_token => self.start.as_str(),
                eos_token => self.end.as_str(),
            })
            .map_err(failed)?;
        Ok(Rendered { text, guard })
    }
}

fn failed(e: minijinja::Error) -> Error {
    Error::ChatTemplate { why: e.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn renders_python_methods_and_the_answer_prompt() {
        let source = "{% for m in messages %}<|{{ m['role'] }}|>{{ m.content.strip() }}{% endfor %}\
                      {% if add_generation_prompt %}<|assistant|>{% endif %}";
        let template = ChatTemplate::new(source, String::new(), String::new()).unwrap();
        let text = |content: &str| {
            let specials = Specials::new([("<|user|>".into(), 1)]).unwrap();
            template.render(&[Message::user(content)], &specials).unwrap().text
        };
        assert_eq!(text("  hi "), "<|user|>hi<|assistant|>");
        assert_eq!(text("\u{e000} <|user|> "), "<|user|>\u{e000} <\u{e001}|user|><|assistant|>");
    }

    #[test]
    fn a_bad_template_and_a_refusal_are_errors() {
        assert!(matches!(ChatTemplate::new("{% for %}", "".into(), "".into()), Err(Error::ChatTemplate { .. })));
        let refusing = ChatTemplate::new("{{ raise_exception('no system') }}", "".into(), "".into()).unwrap();
        assert!(refusing.render(&[], &Specials::new([]).unwrap()).unwrap_err().to_string().contains("no system"));
    }
}
