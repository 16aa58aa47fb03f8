//! Fields of a JSON object, each taken once. In: a body; out: typed values, errors that name the field, and at the end a
//! refusal of every field that nobody took. NOT here: what fields mean.

use super::errors::ApiError;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

/// An object whose fields are being taken out.
#[derive(Debug)]
pub struct Fields {
    left: Map<String, Value>,
}

impl Fields {
    /// The object that a body holds.
    ///
    /// # Errors
    /// [`ApiError`] for what is not UTF-8, not JSON or not an object.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let text = std::str::from_utf8(body)
            .map_err(|e| ApiError::invalid(format!("the body is not UTF-8 text: byte {} is wrong", e.valid_up_to())))?;
        let value: Value =
            serde_json::from_str(text).map_err(|e| ApiError::invalid(format!("the body is not JSON: {e}")))?;
        match value {
            Value::Object(left) => Ok(Self { left }),
            _ => Err(ApiError::invalid("the body is not a JSON object")),
        }
    }

    /// A field, if it is there and not null.
    ///
    /// # Errors
    /// [`ApiError`] for a value of another type: it names the field, down to the element.
    pub fn take<T: DeserializeOwned>(&mut self, name: &str) -> Result<Option<T>, ApiError> {
        match self.left.remove(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => serde_path_to_error::deserialize(value).map(Some).map_err(|e| {
                let path = e.path().to_string();
                let full = match path.as_str() {
                    "." | "" => name.to_string(),
                    p if p.starts_with('[') => format!("{name}{p}"),
                    p => format!("{name}.{p}"),
                };
                ApiError::field(&full, e.inner())
            }),
        }
    }

    /// A number in a range.
    ///
    /// # Errors
    /// As [`Fields::take`], and for a number outside.
    pub fn number(&mut self, name: &str, least: f64, most: f64) -> Result<Option<f64>, ApiError> {
        let value = self.take::<f64>(name)?;
        match value {
            Some(x) if !(least..=most).contains(&x) => {
                Err(ApiError::field(name, format!("must be from {least} to {most}, got {x}")))
            }
            other => Ok(other),
        }
    }

    /// A whole number in a range.
    ///
    /// # Errors
    /// As [`Fields::take`], and for a number outside.
    pub fn whole(&mut self, name: &str, least: i64, most: usize) -> Result<Option<i64>, ApiError> {
        let value = self.take::<i64>(name)?;
        match value {
            Some(x) if x < least => Err(ApiError::field(name, format!("must be {least} or more, got {x}"))),
            Some(x) if usize::try_from(x).is_ok_and(|x| x > most) => {
                Err(ApiError::field(name, format!("must be at most {most}, got {x}")))
            }
            other => Ok(other),
        }
    }

    /// Drops fields that change nothing here.
    pub fn ignore(&mut self, names: &[&str]) {
        names.iter().for_each(|name| drop(self.left.remove(*name)));
    }

    /// Refuses a field unless it is absent or null or `harmless` says that this value asks for nothing.
    ///
    /// # Errors
    /// [`ApiError`] that names it.
    pub fn refuse(&mut self, name: &str, harmless: impl Fn(&Value) -> bool) -> Result<(), ApiError> {
        match self.left.remove(name) {
            None | Some(Value::Null) => Ok(()),
            Some(value) if harmless(&value) => Ok(()),
            Some(_) => Err(ApiError::unsupported(
                name,
                "this server does not support it, and leaving it out would change the answer",
            )),
        }
    }

    /// Refuses what is left.
    ///
    /// # Errors
    /// [`ApiError`] that names the first field nobody took.
    pub fn end(self) -> Result<(), ApiError> {
        match self.left.keys().next() {
            None => Ok(()),
            Some(name) => Err(ApiError::unknown("", name, "there is no such field here").coded("unknown_parameter")),
        }
    }
}

/// Whether a value asks for nothing: false, zero, an empty list or object.
pub fn empty(value: &Value) -> bool {
    match value {
        Value::Bool(b) => !b,
        Value::Number(n) => n.as_f64() == Some(0.0),
        Value::Array(a) => a.is_empty(),
        Value::Object(o) => o.is_empty(),
        Value::Null => true,
        Value::String(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(text: &str) -> Fields {
        Fields::parse(text.as_bytes()).unwrap()
    }

    #[test]
    fn errors_name_the_field_and_the_element() {
        let mut f =
            fields(r#"{"a": -1, "b": "x", "c": [1, "two"], "d": 1e99, "e": 3, "f": 1.5, "g": 99999999999999999999}"#);
        assert_eq!(f.whole("a", 1, 9).unwrap_err().message, "a: must be 1 or more, got -1");
        assert_eq!(f.number("b", 0.0, 1.0).unwrap_err().param.unwrap(), "b");
        assert_eq!(f.take::<Vec<u32>>("c").unwrap_err().param.unwrap(), "c[1]");
        assert!(f.number("d", 0.0, 2.0).unwrap_err().message.starts_with("d: must be from 0 to 2"));
        assert_eq!(f.whole("e", 1, 2).unwrap_err().message, "e: must be at most 2, got 3");
        assert_eq!(f.whole("f", 1, 2).unwrap_err().param.unwrap(), "f");
        assert_eq!(f.whole("g", 1, 2).unwrap_err().param.unwrap(), "g");
        assert!(f.end().is_ok());
    }

    #[test]
    fn what_nobody_took_is_refused_by_name() {
        let mut f = fields(r#"{"user": "me", "tools": [], "logit_bias": {"1": 2}, "oops": null}"#);
        f.ignore(&["user"]);
        f.refuse("tools", empty).unwrap();
        assert_eq!(f.refuse("logit_bias", empty).unwrap_err().code, Some("unsupported_parameter"));
        assert_eq!(f.end().unwrap_err().message, "oops: there is no such field here");
    }

    #[test]
    fn what_is_no_object_is_refused() {
        for bad in [&b"\xff{}"[..], b"{", b"[]", b"", b"nul", b"{\"a\":1}x", &b"[".repeat(100_000)] {
            assert_eq!(Fields::parse(bad).unwrap_err().status, 400);
        }
    }
}
