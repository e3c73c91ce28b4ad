//! A look into a peer's metadata before the library gets it.
//!
//! The library's loader (1.5.1) is not careful: of metadata that ends early it keeps the connection and forgets that it
//! has one, and from then on refuses the whole metadata of that agent too, for the life of the process. So what ends
//! early never reaches it. The format is NIXL's own: fields of a tag, a length (u64, little-endian), bytes, and `|`.

/// Metadata ends before all that it announces is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EndsEarly;

/// Whether metadata follows the known format to its end. If our own library's does, a peer's that does not is damaged.
pub(crate) fn is_known(metadata: &[u8]) -> bool {
    let Some(rest) = metadata.strip_prefix(b"nixlSerDes|") else { return false };
    let mut fields = Fields(rest);
    matches!(fields.take(b"Agent"), Ok(Some(_))) && matches!(fields.all(), Ok(Some(()))) && fields.0.is_empty()
}

/// The agent it names, if its format is the one known here; everything that the known fields announce is there.
pub(crate) fn agent(metadata: &[u8]) -> Result<Option<&[u8]>, EndsEarly> {
    let Some(rest) = metadata.strip_prefix(b"nixlSerDes|") else {
        return if b"nixlSerDes|".starts_with(metadata) { Err(EndsEarly) } else { Ok(None) };
    };
    let mut fields = Fields(rest);
    let Some(agent) = fields.take(b"Agent")? else { return Ok(None) };
    // What does not follow the known format is a later one's: the library's own affair.
    fields.all()?;
    Ok(Some(agent))
}

struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    /// The field of this tag; `None`: another one comes.
    fn take(&mut self, tag: &[u8]) -> Result<Option<&'a [u8]>, EndsEarly> {
        let Some(rest) = self.0.strip_prefix(tag) else {
            return if tag.starts_with(self.0) { Err(EndsEarly) } else { Ok(None) };
        };
        let (len, rest) = rest.split_first_chunk().ok_or(EndsEarly)?;
        let len = usize::try_from(u64::from_le_bytes(*len)).map_err(|_| EndsEarly)?;
        let (field, rest) = rest.split_at_checked(len).ok_or(EndsEarly)?;
        match rest.split_first() {
            Some((b'|', rest)) => self.0 = rest,
            Some(_) => return Ok(None),
            None => return Err(EndsEarly),
        }
        Ok(Some(field))
    }

    /// A field that counts what follows.
    fn count(&mut self, tag: &[u8]) -> Result<Option<u64>, EndsEarly> {
        Ok(self.take(tag)?.and_then(|f| f.try_into().ok()).map(u64::from_le_bytes))
    }

    /// Connections, then for each backend the list of its memory.
    fn all(&mut self) -> Result<Option<()>, EndsEarly> {
        let Some(connections) = self.count(b"Conns")? else { return Ok(None) };
        for _ in 0..connections {
            let (Some(_), Some(_)) = (self.take(b"t")?, self.take(b"c")?) else { return Ok(None) };
        }
        let (Some(_), Some(sections)) = (self.take(b"")?, self.count(b"nixlSecElms")?) else { return Ok(None) };
        for _ in 0..sections {
            let (Some(_), Some(_)) = (self.take(b"bknd")?, self.take(b"nixlDList")?) else { return Ok(None) };
            let (Some(_), Some(ranges)) = (self.take(b"t")?, self.count(b"n")?) else { return Ok(None) };
            for _ in 0..ranges {
                let Some(_) = self.take(b"")? else { return Ok(None) };
            }
        }
        Ok(Some(()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn field(out: &mut Vec<u8>, tag: &str, bytes: &[u8]) {
        out.extend_from_slice(tag.as_bytes());
        out.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
        out.extend_from_slice(bytes);
        out.push(b'|');
    }

    /// Laid out as NIXL 1.5.1 does.
    fn metadata() -> Vec<u8> {
        let mut out = b"nixlSerDes|".to_vec();
        field(&mut out, "Agent", b"some-agent");
        field(&mut out, "Conns", &1u64.to_le_bytes());
        field(&mut out, "t", b"UCX");
        field(&mut out, "c", b"an address with a | in it");
        field(&mut out, "", b"MemSection");
        field(&mut out, "nixlSecElms", &1u64.to_le_bytes());
        field(&mut out, "bknd", b"UCX");
        field(&mut out, "nixlDList", b"nixlSDList");
        field(&mut out, "t", &0u32.to_le_bytes());
        field(&mut out, "n", &2u64.to_le_bytes());
        field(&mut out, "", &[1; 35]);
        field(&mut out, "", &[2; 35]);
        out
    }

    #[test]
    fn every_cut_is_noticed() {
        let whole = metadata();
        assert_eq!(agent(&whole), Ok(Some(&b"some-agent"[..])));
        assert!(is_known(&whole) && !is_known(&whole[1..]) && !is_known(&[&whole[..], b"more"].concat()));
        for n in 0..whole.len() {
            assert_eq!(agent(&whole[..n]), Err(EndsEarly), "{n} of {} bytes", whole.len());
        }
    }

    #[test]
    fn huge_lengths_and_counts_end_early_rather_than_late() {
        let mut huge = b"nixlSerDes|Agent".to_vec();
        huge.extend_from_slice(&[0xff; 8]);
        huge.extend_from_slice(b"abc|");
        assert_eq!(agent(&huge), Err(EndsEarly));
        let mut many = b"nixlSerDes|".to_vec();
        field(&mut many, "Agent", b"a");
        field(&mut many, "Conns", &u64::MAX.to_le_bytes());
        assert_eq!(agent(&many), Err(EndsEarly));
    }

    #[test]
    fn another_format_is_left_to_the_library() {
        assert_eq!(agent(b"something else"), Ok(None));
        let mut later = b"nixlSerDes|".to_vec();
        field(&mut later, "Agent", b"a");
        field(&mut later, "New", b"x");
        assert_eq!(agent(&later), Ok(Some(&b"a"[..])));
        assert_eq!(agent(b"nixlSerDes|Other"), Ok(None));
    }
}
